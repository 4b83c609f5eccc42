"""What speculation saves: steps and CPU time, on a text that the answer quotes and on one that it does not.

    python -m bench.speculation [--model var/models/smollm2-135m] [--draft-model OTHER] [--tokens 128] [--runs 3]

One request at a time through scheduler and runner, no HTTP. Rows: `off`, `ngram` and, with `--draft-model`, `draft`;
`always` beside them takes as many drafts as there can be, to show what the choice of their number is worth. Steps and
accepted drafts hold on a busy machine, too; milliseconds want a quiet one.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report import Row, report
from engine import threads as engine_threads
from engine.config import EngineConfig
from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import PrefixCache
from engine.limits import NUM_DRAFTS, SchedulerConfig
from engine.messages import NewRequest
from engine.scheduling.scheduler import Scheduler
from engine.spec.speculator import Speculator
from engine.types import SamplingParams

if TYPE_CHECKING:
    from engine.runner import ModelRunner

_RECORDS = "".join(
    f"- order {4100 + 37 * i}, customer {name} {surname}, city {city}, amount {19 * i + 23}.50 EUR\n"
    for i, (name, surname, city) in enumerate(
        [
            ("Ada", "Brandt", "Ulm"),
            ("Juno", "Okafor", "Lagos"),
            ("Mira", "Castell", "Porto"),
            ("Oskar", "Lindqvist", "Lund"),
            ("Tess", "Marlow", "Leeds"),
            ("Wen", "Zhao", "Xiamen"),
        ]
    )
)
TEXTS = {
    "quoting": f"The records:\n{_RECORDS}\nThe records, copied:\n{_RECORDS}\nThe records, copied once more:\n",
    "free": "Once upon a time, in a harbour town where the rain came in from three sides, there lived an old",
}


def answer(runner: ModelRunner, speculator: Speculator, prompt: list[int], tokens: int) -> tuple[list[int], int, float]:
    """The tokens of one greedy answer, the steps after the prompt's and their CPU seconds."""
    geometry = runner.geometry
    cache = PrefixCache(
        BlockPool(geometry.num_blocks), geometry.block_size, model_digest=b"", kv_dtype="", enabled=False
    )
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=runner.max_model_len), cache, eos_token_ids=frozenset(), speculator=speculator
    )
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    scheduler.add([NewRequest(1, prompt, params)])
    out: list[int] = []
    steps, start = 0, 0.0
    while scheduler.has_work:
        if out and not start:
            start = time.process_time()
        steps += bool(out)
        plan = scheduler.schedule()
        planned = time.monotonic()
        results = runner.execute(plan)
        speculator.timed(plan.num_tokens, time.monotonic() - planned)
        for output in scheduler.update(plan, results):
            if output.error is not None:
                raise SystemExit(f"the step failed: {output.error}")
            out += output.token_ids
    return out, steps, time.process_time() - start


def main() -> None:
    """Measure, print the table, write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("var/models/smollm2-135m"))
    parser.add_argument("--draft-model", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--drafts", type=int, default=NUM_DRAFTS)
    parser.add_argument("--precision", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    threads = engine_threads.configure(options.threads)
    from engine.load_runner import load_runner
    from engine.loader import open_model
    from engine.spec.loading import demand_of, load_speculator, open_draft
    from engine.text.tokenizer import Tokenizer

    path = options.model if options.model.is_file() else next(iter(sorted(options.model.glob("*.gguf"))))
    model = open_model(path)

    def config(kind: str) -> EngineConfig:
        return EngineConfig(
            model_path=str(path),
            served_name="bench",
            precision=options.precision,
            speculative=kind,  # type: ignore[arg-type]
            num_speculative_tokens=options.drafts,
            draft_model_path=str(options.draft_model) if kind == "draft" else None,
        )

    kinds = ["off", "ngram"] + ["draft"] * (options.draft_model is not None)
    draft = open_draft(config("draft"), model) if options.draft_model else None
    runner = load_runner(
        model,
        precision=options.precision,
        threads=threads,
        max_model_len=1024,
        kv_cache_bytes=256 << 20,
        draft=None if draft is None else demand_of(draft),
    )
    rows = []
    for text, words in TEXTS.items():
        prompt = Tokenizer(model.info).encode(words)
        plain, _, _ = answer(runner, Speculator(), prompt, options.tokens)
        for kind in kinds:
            for always in (False, True) if kind != "off" else (False,):
                speculator = load_speculator(config(kind), runner, draft if kind == "draft" else None, threads=threads)
                speculator.adaptive = not always
                series: dict[tuple[str, str], list[float]] = {}
                for _ in range(options.runs):
                    before = (speculator.stats.drafted_tokens, speculator.stats.accepted_tokens)
                    tokens, steps, seconds = answer(runner, speculator, prompt, options.tokens)
                    drafted = speculator.stats.drafted_tokens - before[0]
                    accepted = speculator.stats.accepted_tokens - before[1]
                    for metric, unit, value in (
                        ("steps", "", steps),
                        ("tokens_per_step", "", (len(tokens) - 1) / steps),
                        ("drafted_tokens", "", drafted),
                        ("accepted_tokens", "", accepted),
                        ("core_cpu_per_token", "ms", 1000 * seconds / (len(tokens) - 1)),
                        ("equal_to_off", "", sum(a == b for a, b in zip(tokens, plain, strict=True)) / len(plain)),
                    ):
                        series.setdefault((metric, unit), []).append(value)
                setting = f"text={text} {options.precision} drafts={options.drafts}"
                name = f"tierline {kind}" + " always" * always
                rows += [Row.of(metric, name, setting, unit, values) for (metric, unit), values in series.items()]
    report("speculation", rows)


if __name__ == "__main__":
    main()
