"""What happens between loading and the first request: small steps, the largest step, and the recording of decode steps.

After it every kernel is built, and memory for the largest step has been had once: the pool of pages was sized by a sum
over the model's shapes, and here that sum meets the machine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.graphs import Recorder
from engine.types import SamplingParams, StepPlan, StepRow

if TYPE_CHECKING:
    from engine.runner import ModelRunner

logger = logging.getLogger(__name__)

_FEW_TOKENS = 32
_GREEDY = SamplingParams(temperature=0.0)
# What draws, ranks and reports the most at a time.
_COSTLY = SamplingParams(
    temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=20, prompt_logprobs=20
)


def warm_up(runner: ModelRunner) -> str | None:
    """One prefill and one decode step from page 1 on, so that the first request finds every kernel built.

    Returns what was wrong with the results: then the model answers nobody. None: nothing.
    """
    config = runner.attention.config
    tokens = [0] * min(_FEW_TOKENS, runner.max_model_len - 1, config.max_num_batched_tokens)
    pages = list(range(1, -(-(len(tokens) + 1) // config.block_size) + 1))
    if not tokens or pages[-1] >= config.num_blocks:
        return None
    faults: list[str] = []
    for start, chunk in ((0, tokens), (len(tokens), [0])):
        row = StepRow(0, chunk, start, pages, True, _GREEDY, [*tokens, 0], len(tokens))
        faults += [result.error for result in runner.execute(StepPlan([row])) if result.error is not None]
    _clean(runner, pages)
    return faults[0] if faults else None


def probe(runner: ModelRunner, adapter: int) -> str | None:
    """Run a few tokens with an adapter, on the null page, which is nobody's. Why it cannot serve, or None.

    May be called between any two steps.
    """
    config = runner.attention.config
    most = min(config.block_size, runner.max_model_len, config.max_num_batched_tokens, runner.spec.vocab_size)
    tokens = list(range(most))
    [result] = runner.execute(StepPlan([StepRow(0, tokens, 0, [0], True, _GREEDY, tokens, most, adapter=adapter)]))
    _clean(runner, [0])
    return result.error


def largest_steps(runner: ModelRunner) -> list[StepPlan]:
    """The steps that take the most memory: as many tokens as there may be, in as many rows, and as few rows as hold
    them; every row samples in the costliest way, and prompts are scored."""
    config = runner.attention.config
    most_tokens = min(runner.max_model_len, (config.num_blocks - 1) * config.block_size)
    many = min(config.max_num_seqs, config.max_num_batched_tokens)
    few = min(many, -(-config.max_num_batched_tokens // most_tokens))
    return [_step(runner, rows, min(most_tokens, config.max_num_batched_tokens // rows)) for rows in (many, few)]


def _step(runner: ModelRunner, num_rows: int, length: int) -> StepPlan:
    """`num_rows` prompts of `length` tokens, all on the same pages: what they hold does not matter here."""
    pages = range(1, 1 - (-length // runner.geometry.block_size))
    tokens = [0] * length
    rows = [StepRow(i, tokens, 0, pages, True, _COSTLY, tokens, length, score_from=0) for i in range(num_rows)]
    return StepPlan(rows)


def rehearse(runner: ModelRunner) -> None:
    """Run the largest steps once. A step that takes more than the plan of memory has for it is logged.

    Raises:
        EngineMemoryError: the pool leaves too little for them.
    """
    device = runner.attention.config.device
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for plan in largest_steps(runner):
        flight = runner.begin(plan)  # and not `execute`, which would make do with less
        flight.draw()
        flight.results()
        _clean(runner, plan.rows[0].block_table)
    taken, planned = torch.cuda.max_memory_allocated(device) - held, runner.ledger().scratch_bytes
    log = logger.warning if taken > planned else logger.info
    log("the largest step takes %d bytes of the GPU's memory, %d were planned", taken, planned)


def try_to_record(runner: ModelRunner, recorder: Recorder) -> None:
    """Record steps; where that fails, they run kernel by kernel, and the log says so."""
    try:
        runner.record(recorder)
    except RuntimeError as error:
        logger.warning("steps cannot be recorded, they will start kernel by kernel: %s", error)


def _clean(runner: ModelRunner, pages: Sequence[int]) -> None:
    runner.attention.kv_cache[:, :, pages[0] : pages[-1] + 1] = 0
