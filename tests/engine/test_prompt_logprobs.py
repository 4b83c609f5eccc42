"""Log-probabilities of prompts against transformers, whatever the chunks; and pages that are copied before a step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from engine.load_runner import load_runner
from engine.runner import ModelRunner
from engine.types import SamplingParams, StepPlan, TokenLogprob
from tests.engine.models import generate, row, write_model

PROMPT = [int(t) for t in np.random.default_rng(1).integers(2, 320, 45)]
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=3)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    path = tmp_path_factory.mktemp("scored") / "tiny.gguf"
    return path, write_model(path)


@pytest.fixture(scope="module")
def runner(reference: tuple[Path, transformers.PreTrainedModel]) -> ModelRunner:
    return load_runner(reference[0], precision="float32", max_model_len=96, kv_cache_bytes=4 << 20)


@pytest.fixture(scope="module")
@torch.inference_mode()
def expected(reference: tuple[Path, transformers.PreTrainedModel]) -> torch.Tensor:
    """float64 `[prompt - 1, vocab]`."""
    logits = reference[1](torch.tensor([PROMPT])).logits[0, :-1]
    return logits.double().log_softmax(dim=-1)


def check(entries: list[TokenLogprob], expected: torch.Tensor, counts: int = 3) -> None:
    assert [entry.token_id for entry in entries] == PROMPT[1:]
    for entry, want in zip(entries, expected, strict=True):
        assert entry.logprob == pytest.approx(float(want[entry.token_id]), abs=2e-5)
        assert entry.rank == 1 + int((want > want[entry.token_id]).sum())
        assert [token for token, _ in entry.top] == want.topk(counts).indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(want.topk(counts).values.tolist(), abs=2e-5)


@pytest.mark.parametrize("chunk", [1, 7, 16, 44, 45])
def test_a_prompt_in_chunks(runner: ModelRunner, expected: torch.Tensor, chunk: int) -> None:
    entries: list[TokenLogprob] = []
    for start in range(0, len(PROMPT), chunk):
        part = row(PROMPT, [1, 2, 3], start=start, stop=min(start + chunk, len(PROMPT)), params=SCORED)
        (result,) = runner.execute(StepPlan([dataclasses.replace(part, score_from=0)]))
        assert result.error is None
        entries += result.prompt_logprobs
    check(entries, expected)


def test_only_what_is_asked_for_and_only_of_the_prompt(runner: ModelRunner, expected: torch.Tensor) -> None:
    """From the 20th position on, beside a row that asks for nothing; the answer's tokens are not the prompt's."""
    answer = [*PROMPT, 9, 8, 7]
    mate = row(PROMPT[:9], [4])
    asks = row(answer, [1, 2, 3], params=SCORED, num_prompt_tokens=len(PROMPT))
    plain, scored = runner.execute(StepPlan([mate, dataclasses.replace(asks, score_from=20)]))
    assert plain.prompt_logprobs == ()
    assert [entry.token_id for entry in scored.prompt_logprobs] == PROMPT[21:]
    found = [entry.logprob for entry in scored.prompt_logprobs]
    assert found == pytest.approx([float(e[t]) for e, t in zip(expected[20:], PROMPT[21:], strict=True)], abs=2e-5)
    assert scored.token_id is not None


def test_a_prompt_of_one_token_has_nothing_to_score(runner: ModelRunner) -> None:
    (result,) = runner.execute(StepPlan([dataclasses.replace(row(PROMPT[:1], [1], params=SCORED), score_from=0)]))
    assert result.prompt_logprobs == ()
    assert result.token_id is not None


def test_a_row_that_failed_has_no_scores(runner: ModelRunner, expected: torch.Tensor) -> None:
    broken = dataclasses.replace(row([*PROMPT[:20], 320], [4, 5], params=SCORED, request_id=1), score_from=0)
    sound = dataclasses.replace(row(PROMPT, [1, 2, 3], params=SCORED), score_from=0)
    results = runner.execute(StepPlan([broken, sound]))
    assert results[0].error is not None
    assert results[0].prompt_logprobs == ()
    check(list(results[1].prompt_logprobs), expected)


def test_copied_pages_carry_an_answer_on(runner: ModelRunner) -> None:
    """Two answers go on from one prompt on copies of its last page; sources are read before targets are written."""
    want = generate(runner, PROMPT, 6, pages=[1, 2, 3, 4])
    other = generate(runner, PROMPT[:20], 6, pages=[5, 6])
    runner.execute(StepPlan([row(PROMPT, [1, 2, 3]), row(PROMPT[:20], [5, 6], request_id=1)]))
    plan = StepPlan(
        [
            row(PROMPT, [1, 2, 7], start=44),
            row(PROMPT, [1, 2, 8], start=44, request_id=1),
            row(PROMPT[:20], [5, 3], start=19, request_id=2),
        ],
        copies=[(3, 7), (3, 8), (6, 3)],
    )
    results = runner.execute(plan)
    assert [r.token_id for r in results] == [want[0], want[0], other[0]]
    for pages in ([1, 2, 7, 9], [1, 2, 8, 10]):
        tokens = [*PROMPT, want[0]]
        while len(tokens) < len(PROMPT) + 6:
            (result,) = runner.execute(StepPlan([row(list(tokens), pages, start=len(tokens) - 1)]))
            assert result.token_id is not None
            tokens.append(result.token_id)
        assert tokens[len(PROMPT) :] == want
