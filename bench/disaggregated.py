"""Long prompts that arrive while answers are written: one engine that cuts them into chunks, against two of which one
computes them.

    python -m bench.disaggregated [--runs 3] [--streams 4] [--prompts 6] [--prompt-tokens 1500]

Everything goes through a gateway, with the small model. Some answers are being written all the time; prompts arrive one
after the other, a fixed time apart, whatever is under way. Measured from the client: time to the first token of those
prompts, and the time between two tokens of the answers. Every system has the same cores: one engine has a thread
for each, of two engines each has half of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.bundled import CONTEXT_TOKENS, MODEL, gateway, pulled_model
from bench.engine import EngineProcess
from bench.gateway import free_port
from bench.report import Row, report

SYSTEMS = ("one_engine", "one_engine_target_tpot", "prefill_decode_shm", "prefill_decode_tcp")
_TARGET_TPOT_MS = 50
_APART_S = 1.0  # from one prompt to the next
_ANSWER_TOKENS = 16


@dataclass(slots=True)
class Measured:
    """One run: seconds to the first token of each long prompt, and between the tokens of the answers."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Load:
    streams: int
    prompts: int
    prompt_tokens: int

    def __str__(self) -> str:
        return f"streams={self.streams} prompts={self.prompts} prompt_tokens={self.prompt_tokens} apart_s={_APART_S:g}"


async def measure(load: Load, runs: int) -> list[Row]:
    """Rows of all systems, in turns, so that a slow minute of the machine hits all of them."""
    model = pulled_model()
    found: dict[str, list[Measured]] = {name: [] for name in SYSTEMS}
    for run in range(runs):
        for name in SYSTEMS:
            found[name].append(await _run(name, model, load, run))
            print(name, run, file=sys.stderr, flush=True)
    return [row for name, measured in found.items() for row in rows_of(name, str(load), measured)]


def rows_of(name: str, setting: str, measured: Sequence[Measured]) -> list[Row]:
    """What is reported of one system, a value per run."""
    rows = [
        Row.of("ttft_p50", name, setting, "s", [statistics.median(one.first) for one in measured]),
        Row.of("ttft_max", name, setting, "s", [max(one.first) for one in measured]),
    ]
    for share, word in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99")):
        values = [sorted(one.between)[int(share * (len(one.between) - 1))] for one in measured]
        rows.append(Row.of(f"time_between_tokens_{word}", name, setting, "s", values))
    rows.append(Row.of("time_between_tokens_max", name, setting, "s", [max(one.between) for one in measured]))
    return rows


async def _run(name: str, model: Path, load: Load, run: int) -> Measured:
    os.environ["TIERLINE_PAGE_SEED"] = secrets.token_hex(32)
    cores = len(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plan = _engines(name, cores, folder)
        engines = [EngineProcess(model, arguments) for _, arguments in plan]
        for engine in engines:
            stack.callback(engine.stop)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
            for engine in engines:
                await engine.wait_ready(session)
            roles = [(engine.url, role) for engine, (role, _) in zip(engines, plan, strict=True)]
            url, key = stack.enter_context(gateway(_backend(roles), folder))
            return await _arrive(session, url, key, load, run)


def _engines(name: str, cores: int, folder: Path) -> list[tuple[str, list[str]]]:
    """Role and arguments of each engine of a system."""
    common = ["--max-model-len", str(CONTEXT_TOKENS), "--kv-cache-bytes", str(512 << 20)]
    if name.startswith("one_engine"):
        target = ["--target-tpot-ms", str(_TARGET_TPOT_MS)] if name.endswith("target_tpot") else []
        return [("both", [*common, "--threads", str(cores), *target])]
    common += ["--threads", str(max(1, cores // 2))]
    address = f"shm://{folder}/pages" if name.endswith("shm") else f"tcp://127.0.0.1:{free_port()}"
    return [
        ("prefill", [*common, "--role", "prefill", "--kv-listen", address]),
        ("decode", [*common, "--role", "decode", "--kv-peer", address]),
    ]


def _backend(engines: list[tuple[str, str]]) -> dict[str, Any]:
    """`engines`: address and role of each."""
    backend: dict[str, Any] = {"replicas": [{"url": f"{url}/v1", "role": role} for url, role in engines]}
    if len(engines) > 1:
        backend["placement"] = {"prefill_from_tokens": 256, "prefill_timeout_s": 50}
    return backend


async def _arrive(session: aiohttp.ClientSession, url: str, key: str, load: Load, run: int) -> Measured:
    rng, measured = random.Random(run), Measured()
    ended, began = asyncio.Event(), time.monotonic() + 2 * _APART_S  # by then, all answers are being written

    async def tokens(prompt: list[int], count: int) -> list[float]:
        """When each event of an answer came, and before them when it was asked for."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        times = [time.monotonic()]
        headers = {"authorization": f"Bearer {key}"}
        async with session.post(f"{url}/completions", json={**body, "stream": True}, headers=headers) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {") and b'"choices":[{' in line:
                    times.append(time.monotonic())
                    if ended.is_set():
                        break
        return times

    def prompt(length: int) -> list[int]:
        return [rng.randrange(100, 40_000) for _ in range(length)]

    async def answer() -> None:
        while not ended.is_set():
            times = await tokens(prompt(16), 1000)
            counted = [moment for moment in times[1:] if moment >= began]
            measured.between += [later - earlier for earlier, later in itertools.pairwise(counted)]

    async def arrival(number: int) -> None:
        await asyncio.sleep(number * _APART_S)
        asked, first, *_ = await tokens(prompt(load.prompt_tokens), _ANSWER_TOKENS)
        measured.first.append(first - asked)

    writing = [asyncio.create_task(answer()) for _ in range(load.streams)]
    await asyncio.sleep(began - time.monotonic())
    await asyncio.gather(*(arrival(number) for number in range(load.prompts)))
    ended.set()
    await asyncio.gather(*writing)
    return measured


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.disaggregated", description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    options = parser.parse_args(arguments)
    load = Load(options.streams, options.prompts, options.prompt_tokens)
    report("disaggregated", asyncio.run(measure(load, options.runs)))


if __name__ == "__main__":
    main(sys.argv[1:])
