"""What it is worth to send a request where its prefix is: beside random, round robin, power of two choices, consistent
hashing.

    python -m bench.placement --trace FILE_OR_FOLDER [--requests N]    a recorded trace over simulated replicas
    python -m bench.placement --engines [--rounds 12]                  two bundled engines behind a gateway

The first replays a trace (see `placement_trace.py` for what is real in it and what is not); its rows are named
`simulated`. The second asks real engines with a real model through a real gateway: conversations whose turns come in
between those of others. Each writes its own part of `bench/results/placement.json` and keeps the other's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.placement_trace import PREFILL_PER_S, SYSTEMS, read, replay
from bench.report import RESULTS, Row, report

# Replicas, load (tokens of all prompts by what the replicas can compute, if nothing were held), gateways, and how many
# requests of the trace; None: all of them.
Setting = tuple[int, float, int, int | None]
SETTINGS: tuple[Setting, ...] = ((4, 0.8, 1, None), (8, 0.5, 1, 3000), (8, 0.8, 4, 3000), (16, 0.8, 1, 3000))
SIMULATED = "simulated "


def simulated(trace: Path, most: int | None) -> Iterator[Row]:
    whole = read(trace, most)
    for replicas, load, gateways, number in SETTINGS:
        asked = whole[:number]
        per_s = sum(one.prompt_tokens for one in asked) / asked[-1].at
        speed = load * replicas * PREFILL_PER_S / per_s
        setting = f"replicas={replicas} load={load:g} gateways={gateways} requests={len(asked)}"
        for kind in SYSTEMS:
            if kind == "tierline_shared" and gateways == 1:
                continue  # there is nobody to tell
            found = replay(asked, kind, replicas, speed, gateways=gateways)
            print(f"{setting} {kind}: {found}", file=sys.stderr, flush=True)
            yield Row.of(SIMULATED + "prefix_hit_share", kind, setting, "of prompt tokens", [found.hit_share])
            yield Row.of(SIMULATED + "ttft_p50", kind, setting, "s", [found.ttft_p50_s])
            yield Row.of(SIMULATED + "ttft_p99", kind, setting, "s", [found.ttft_p99_s])
            yield Row.of(SIMULATED + "imbalance", kind, setting, "max/mean of computed tokens", [found.imbalance])


def kept(*, simulated: bool) -> list[Row]:
    """The rows of the other part, as they were measured last."""
    path = RESULTS / "placement.json"
    rows = [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []
    return [row for row in rows if row.metric.startswith(SIMULATED) == simulated]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.placement", description="Measure the choice of replicas.")
    parser.add_argument("--trace", type=Path, help="a Mooncake trace: a .jsonl or .jsonl.gz file, or its folder")
    parser.add_argument("--requests", type=int, help="no more than so many of it (default: all)")
    parser.add_argument("--engines", action="store_true", help="two bundled engines behind a gateway")
    parser.add_argument("--rounds", type=int, default=12, help="turns per conversation (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="runs of the engines (%(default)s)")
    options = parser.parse_args()
    if options.trace is None and not options.engines:
        parser.error("give --trace FILE, or --engines")
    if options.trace is not None:
        report("placement", [*simulated(options.trace, options.requests), *kept(simulated=False)])
    if options.engines:
        from bench.placement_engines import measure

        report("placement", [*kept(simulated=True), *asyncio.run(measure(options.rounds, options.runs))])


if __name__ == "__main__":
    main()
