"""Beam search: the algorithm against transformers, and the scheduler's beams against the algorithm alone."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import transformers

from engine.limits import NeverFits
from engine.messages import NewRequest, Output
from engine.scheduling.beams import BeamSearch, Found
from engine.scheduling.scheduler import Scheduler
from engine.types import BeamParams, FinishReason, RowResult, SamplingParams, StepRow, TokenLogprob
from tests.engine.fakes import EOS, FakeRunner, expected_tokens, make_scheduler, state, step
from tests.engine.models import write_model

CASES = [
    BeamParams(1),
    BeamParams(3),
    BeamParams(4, 0.0, "never"),
    BeamParams(4, 2.0),
    BeamParams(3, -1.0),
    BeamParams(3, 1.0, True),
    BeamParams(5, 1.5, "never"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> transformers.PreTrainedModel:
    model = write_model(tmp_path_factory.mktemp("beams") / "tiny.gguf")
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def search(
    model: transformers.PreTrainedModel, prompt: list[int], params: BeamParams, max_tokens: int, ends: frozenset[int]
) -> list[Found]:
    """The algorithm with transformers' own log-probabilities."""
    beams = BeamSearch(params, max_tokens=max_tokens, end_ids=ends)
    sequences = [list(prompt)]
    while True:
        logprobs = model(torch.tensor(sequences)).logits[:, -1].log_softmax(dim=-1)
        values, tokens = logprobs.topk(beams.num_candidates)
        rows = [list(zip(t.tolist(), v.tolist(), strict=True)) for t, v in zip(tokens, values, strict=True)]
        moves = beams.advance(rows)
        if not moves:
            return beams.found
        sequences = [[*sequences[move.parent], move.token_id] for move in moves]


@pytest.mark.parametrize("params", CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_equal_to_transformers(model: transformers.PreTrainedModel, params: BeamParams, seed: int) -> None:
    """Whatever the penalty and the rule of stopping, with no token that ends an answer, two, or many."""
    dice = random.Random(seed)
    prompt = [dice.randrange(2, 320) for _ in range(9)]
    ends = frozenset(dice.sample(range(320), (0, 2, 20)[seed]))
    found = search(model, prompt, params, 12, ends)
    want = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=params.width,
        num_return_sequences=params.width,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=sorted(ends) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = [row[len(prompt) :].tolist() for row in want.sequences]
    lengths = [next((i for i, t in enumerate(row, 1) if t in ends), len(row)) for row in sequences]
    assert [list(f.token_ids) for f in found] == [row[:n] for row, n in zip(sequences, lengths, strict=True)]
    if params.width > 1:
        assert [f.score for f in found] == pytest.approx(want.sequences_scores.tolist(), rel=1e-4)


def test_enough_beams_find_the_best_answer_of_all() -> None:
    """Every answer of four tokens over five, scored one by one."""
    table = np.log(np.random.default_rng(3).dirichlet(np.ones(5), size=(5, 5)))  # of a token after the two before it

    def row(tokens: tuple[int, ...]) -> list[tuple[int, float]]:
        before = (0, 0, *tokens)[-2:]
        return [(token, float(table[before][token])) for token in range(5)]

    def score(tokens: tuple[int, ...]) -> float:
        return sum(dict(row(tokens[:i]))[token] for i, token in enumerate(tokens))

    beams = BeamSearch(BeamParams(125, 0.0, "never"), max_tokens=4, end_ids=frozenset())
    sequences: list[tuple[int, ...]] = [()]
    while moves := beams.advance([row(tokens) for tokens in sequences]):
        sequences = [(*sequences[move.parent], move.token_id) for move in moves]
    every = [(a, b, c, d) for a in range(5) for b in range(5) for c in range(5) for d in range(5)]
    best = sorted(every, key=score, reverse=True)[:125]
    assert [f.token_ids for f in beams.found] == best
    assert math.isclose(beams.found[0].score, score(best[0]), rel_tol=1e-9)


# --- among the scheduler's requests ------------------------------------------------------------------------------


def candidates_after(kv: int, count: int) -> tuple[tuple[int, float], ...]:
    """What the runner without a model finds likely; twenty tokens, of which token 0 ends an answer."""
    dice = random.Random(kv)
    weights = np.log(np.array([dice.random() for _ in range(20)]))
    return tuple((int(token), float(weights[token])) for token in np.argsort(-weights)[:count])


class BeamRunner(FakeRunner):
    """Reads the state that its candidates depend on through the pages."""

    def choose(self, row: StepRow, states: Sequence[int]) -> RowResult:
        result = super().choose(row, states)
        if row.sample and row.params.logprobs is not None and not result.error:
            last, size = row.start + len(row.token_ids) - 1, self.geometry.block_size
            kv = self.pages[row.block_table[last // size]][last % size]
            assert kv is not None
            top = candidates_after(kv, row.params.logprobs)
            return dataclasses.replace(result, logprobs=(TokenLogprob(*top[0], top),))
        return result


def alone(prompt: Sequence[int], params: BeamParams, max_tokens: int) -> list[Found]:
    """The same search without scheduler and pages."""
    beams = BeamSearch(params, max_tokens=max_tokens, end_ids=frozenset({EOS}))
    sequences = [list(prompt)]
    while moves := beams.advance([candidates_after(state(tokens), beams.num_candidates) for tokens in sequences]):
        sequences = [[*sequences[move.parent], move.token_id] for move in moves]
    return beams.found


def new(ids: Sequence[int], prompt: Sequence[int], beam: BeamParams, max_tokens: int = 12) -> list[NewRequest]:
    return [NewRequest(i, list(prompt), SamplingParams(max_tokens=max_tokens, beam=beam), group=1) for i in ids]


def finish(scheduler: Scheduler, runner: FakeRunner, max_steps: int = 3000) -> dict[int, Output]:
    """The last output of every request."""
    ends: dict[int, Output] = {}
    for _ in range(max_steps):
        if not scheduler.has_work:
            assert scheduler.cache.pool.num_used == 0
            return ends
        ends |= {output.request_id: output for output in step(scheduler, runner) if output.finish_reason}
    raise AssertionError("no end in sight")


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("params", CASES, ids=str)
def test_beams_share_pages_and_find_what_the_search_finds(
    params: BeamParams, block_size: int, prefix_cache: bool
) -> None:
    runner = BeamRunner(num_blocks=200, block_size=block_size)
    scheduler = make_scheduler(runner, max_num_seqs=8, prefix_cache=prefix_cache)
    prompt = range(1, 23)
    scheduler.add(new(range(1, params.width + 1), prompt, params))
    ends = finish(scheduler, runner)
    want = alone(prompt, params, 12)
    assert [tuple(ends[i].token_ids) for i in range(1, params.width + 1)] == [found.token_ids for found in want]
    for i, found in enumerate(want, 1):
        ended = found.token_ids[-1] == EOS
        assert ends[i].finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert ends[i].stop_token_id == (EOS if ended else None)
    # The prompt once, then a token per beam and step: no beam computes what another has.
    steps = scheduler.stats.generated_tokens // params.width
    assert runner.tokens_run == len(prompt) + params.width * (steps - 1)
    given = sum(len(end.token_ids) for end in ends.values())
    assert given + sum(end.tokens_beside for end in ends.values()) == params.width * steps


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_blocks", [19, 24, 40])
def test_beams_among_others_in_a_small_pool(num_blocks: int, prefix_cache: bool) -> None:
    """Two searches and four plain requests, with too few pages for all: preempted beams wait for each other."""
    runner = BeamRunner(num_blocks=num_blocks)
    scheduler = make_scheduler(runner, max_num_seqs=10, prefix_cache=prefix_cache)
    beam = BeamParams(3, 0.5, "never")
    prompts = {100: range(1, 9), 200: range(2, 12)}
    plain = {i: [i, i + 1, i + 2] for i in (1, 2, 3, 4)}
    for i in (1, 2):
        scheduler.add([NewRequest(i, plain[i], SamplingParams(max_tokens=14))])
    for first, prompt in prompts.items():
        scheduler.add(new(range(first, first + 2), prompt, beam))
    for i in (3, 4):
        scheduler.add([NewRequest(i, plain[i], SamplingParams(max_tokens=14))])
    tokens: dict[int, list[int]] = {}
    for _ in range(4000):
        if not scheduler.has_work:
            break
        for output in step(scheduler, runner):
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert not scheduler.has_work
    assert scheduler.cache.pool.num_used == 0
    for first, prompt in prompts.items():
        want = alone(prompt, beam, 12)
        assert [tuple(tokens[first + i]) for i in (0, 1)] == [found.token_ids for found in want[:2]]
    assert all(tokens[i] == expected_tokens(prompt, 14) for i, prompt in plain.items())
    if num_blocks == 19:
        assert scheduler.stats.preemptions > 0


@pytest.mark.parametrize("at", range(1, 9))
def test_a_preempted_beam_is_computed_again(at: int) -> None:
    runner = BeamRunner(num_blocks=100)
    scheduler = make_scheduler(runner, prefix_cache=False)
    beam = BeamParams(3)
    scheduler.add(new([1], range(1, 12), beam))
    for number in itertools.count():
        if number == at:
            for victim in scheduler._running[1:] or scheduler._running[:]:
                scheduler._preempt(victim)
        outputs = step(scheduler, runner)
        if outputs:
            break
    assert tuple(outputs[0].token_ids) == alone(range(1, 12), beam, 12)[0].token_ids
    assert scheduler.cache.pool.num_used == 0


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("how", ["abort", "row", "step", "one"])
def test_a_search_ends_as_a_whole(at: int, how: str) -> None:
    runner = BeamRunner(num_blocks=100)
    scheduler = make_scheduler(runner, max_num_batched_tokens=6)
    scheduler.add(new([1, 2], range(1, 12), BeamParams(3)))
    for _ in range(at):
        step(scheduler, runner)
    if how == "abort":
        scheduler.abort([1, 2])
        scheduler.abort([1])
        outputs: list[Output] = []
    elif how == "one":
        scheduler.abort([1])
        ends = finish(scheduler, runner)
        assert list(ends) == [2], "its neighbour's place among the answers stays"
        assert tuple(ends[2].token_ids) == alone(range(1, 12), BeamParams(3), 12)[1].token_ids
        outputs = []
    else:
        plan = scheduler.schedule()
        if how == "row":
            runner.row_errors[plan.rows[-1].request_id] = "boom"
            outputs = scheduler.update(plan, runner.execute(plan))
        else:
            outputs = scheduler.fail_step("boom")
        assert [(o.request_id, o.error, o.token_ids) for o in outputs] == [(1, "boom", []), (2, "boom", [])]
    scheduler.check()
    assert not scheduler.has_work
    assert scheduler.cache.pool.num_used == 0


def test_what_can_never_run_is_refused() -> None:
    scheduler = make_scheduler(BeamRunner(num_blocks=13), max_num_seqs=4)
    with pytest.raises(NeverFits, match="5 beams asked for"):
        scheduler.add(new([1], [1, 2], BeamParams(5)))
    with pytest.raises(NeverFits, match="12 tokens for each of 4 beams"):
        scheduler.add(new([1], range(1, 13), BeamParams(4)))
    scheduler.add(new([1], range(1, 12), BeamParams(4)))
    (end,) = finish(scheduler, BeamRunner(num_blocks=13)).values()
    assert len(end.token_ids) == 1
    scheduler.add(new([7], [1], BeamParams(2)))
    with pytest.raises(NeverFits, match="in use"):
        scheduler.add(new([7], [1], BeamParams(2)))
