"""The draft model's own KV: right after rejections, pauses, prefix hits and preemptions, or its drafts would show it.

`FakeRunner` stands for both models: its next token is a hash of all KV before it, so one stale slot in the draft
model's pages makes a draft that the other model does not share.
"""

import random

import pytest

from engine.messages import NewRequest
from engine.scheduling.request import Request
from engine.spec.draft_model import DraftModel
from engine.spec.speculator import Speculator
from engine.types import RowResult, SamplingParams
from tests.engine.fakes import FakeRunner, expected_tokens, make_scheduler, run_all, step

PROMPTS = {1: [1, 2, 3, 1, 2, 3, 1, 2, 3], 2: [1, 2, 3, 1, 2, 3, 1, 2, 4], 3: [7], 4: list(range(1, 30))}


class Erring(FakeRunner):
    """A draft model that sometimes says another token than the big one would."""

    def __init__(self, error_rate, **sizes):
        super().__init__(**sizes)
        self.dice = random.Random(1)
        self.error_rate = error_rate
        self.errors = 0

    def choose(self, row, states):
        result = super().choose(row, states)
        if result.token_ids and self.dice.random() < self.error_rate:
            self.errors += 1
            return RowResult(row.request_id, (result.token_ids[0] % 900 + 1,))
        return result


class Watched(DraftModel):
    """Compares every draft with the continuation of all that stands before it, as computed without pages."""

    rounds = wrong = 0

    def propose(self, counts):
        drafts = super().propose(counts)
        for request, found in drafts.items():
            assert 1 <= len(found) <= counts[request]
            for i, draft in enumerate(found):
                self.wrong += [draft] != expected_tokens([*request.token_ids, *found[:i]], 1)
            self.rounds += len(found)
        return drafts


def engine(error_rate=0.0, *, num_blocks=60, budget=32, max_model_len=128, draft_len=128, draft_budget=64, **options):
    runner = FakeRunner(num_blocks, max_model_len=max_model_len)
    small = Erring(error_rate, num_blocks=num_blocks, max_model_len=draft_len)
    proposer = Watched(small, max_num_batched_tokens=draft_budget)
    speculator = Speculator(proposer, 4, adaptive=False)
    return (
        runner,
        small,
        proposer,
        make_scheduler(runner, speculator=speculator, max_num_batched_tokens=budget, **options),
    )


def add(scheduler, prompts=PROMPTS, start=0, max_tokens=24):
    scheduler.add([NewRequest(start + i, p, SamplingParams(max_tokens=max_tokens)) for i, p in prompts.items()])


def test_an_equal_model_drafts_without_error_and_reads_each_token_once():
    runner, small, proposer, scheduler = engine()
    add(scheduler, {4: PROMPTS[4]})
    assert run_all(scheduler, runner) == {4: expected_tokens(PROMPTS[4], 24)}
    assert proposer.wrong == 0
    stats = scheduler.speculator.stats
    assert stats.accepted_tokens == stats.drafted_tokens
    # Every token but the last few: the drafts it proposed, what it had to catch up with, and the last accepted draft
    # of each run, which it had proposed but not read.
    assert small.tokens_run <= len(PROMPTS[4]) + 24
    assert runner.steps < 10


@pytest.mark.parametrize("error_rate", [0.1, 0.5])
def test_rejected_drafts_leave_nothing_behind(error_rate):
    runner, small, proposer, scheduler = engine(error_rate)
    for start in range(0, 50, 10):
        add(scheduler, start=start)
        tokens = run_all(scheduler, runner)
        assert tokens == {start + i: expected_tokens(p, 24) for i, p in PROMPTS.items()}
    assert proposer.wrong == small.errors > 20, "nothing is wrong but what the model was told to get wrong"
    stats = scheduler.speculator.stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_pages_from_the_prefix_cache_serve_the_draft_model_too():
    runner, small, proposer, scheduler = engine()
    add(scheduler, {4: PROMPTS[4]})
    run_all(scheduler, runner)
    before = small.tokens_run
    add(scheduler, {5: [*PROMPTS[4], 99]}, max_tokens=6)
    assert run_all(scheduler, runner)[5] == expected_tokens([*PROMPTS[4], 99], 6)
    assert scheduler.cache.stats.hit_tokens == 28
    assert small.tokens_run - before <= 30 - 28 + 6
    assert proposer.wrong == 0


def test_a_page_that_went_to_somebody_else_is_not_taken_for_what_it_was():
    # 11 pages of 4: every request evicts what the one before it left.
    runner, _, proposer, scheduler = engine(num_blocks=12, max_model_len=44)
    for number in range(40):
        prompt = [1 + number % 3] * 9 + [2, 3]
        add(scheduler, {number: prompt}, max_tokens=20)
        assert run_all(scheduler, runner)[number] == expected_tokens(prompt, 20)
    assert scheduler.cache.stats.evicted_pages > 0
    assert proposer.wrong == 0
    assert set(proposer._page_keys) <= set(range(1, 12))


def test_a_page_that_was_written_over_in_part_is_computed_again():
    small = FakeRunner()
    model = DraftModel(small, max_num_batched_tokens=64)

    def request(number, token_ids, pages):
        return Request(number, number, token_ids, len(token_ids), SamplingParams(), 99, b"", block_table=pages)

    text = [1, 2, 3, 4, 5]
    for number, (token_ids, pages) in enumerate([(text, [1, 2]), ([8, 9], [1]), (text, [1, 3]), (text, [1, 4])]):
        before, one = small.tokens_run, request(number, token_ids, pages)
        assert model.propose({one: 2}) == {one: expected_tokens(token_ids, 2)}
        assert small.tokens_run - before == (2 if number == 3 else len(token_ids) + 1)


def test_preemption_and_abort_at_any_step():
    for at in range(1, 9):
        runner, _, proposer, scheduler = engine(num_blocks=24, max_model_len=60)
        add(scheduler)
        tokens = {i: [] for i in PROMPTS}
        number = 0
        while scheduler.has_work:
            number += 1
            if number == at:
                for victim in scheduler._running[1:]:
                    scheduler._preempt(victim)
                scheduler.abort([3])
            for output in step(scheduler, runner):
                tokens[output.request_id] += output.token_ids
        assert all(tokens[i] == expected_tokens(PROMPTS[i], 24) for i in (1, 2, 4))
        assert proposer.wrong == 0
        assert not proposer._progress


@pytest.mark.parametrize("error_rate", [0.0, 0.4])
def test_a_pause_is_caught_up_with(error_rate):
    runner, small, proposer, scheduler = engine(error_rate)
    add(scheduler, max_tokens=60)
    speculator, dice = scheduler.speculator, random.Random(2)
    counts = speculator.counts
    speculator.counts = lambda *a, **k: {r: n for r, n in counts(*a, **k).items() if dice.random() < 0.4}
    assert run_all(scheduler, runner) == {i: expected_tokens(p, 60) for i, p in PROMPTS.items()}
    assert proposer.wrong == small.errors
    assert proposer.rounds > 40


def test_a_long_prompt_is_read_in_pieces_and_drafted_for_when_it_is_read():
    runner, small, proposer, scheduler = engine(draft_budget=8)
    seen = []
    small.before_step = lambda plan: seen.append(plan.num_tokens)
    add(scheduler, {4: PROMPTS[4]})
    assert run_all(scheduler, runner)[4] == expected_tokens(PROMPTS[4], 24)
    assert max(seen) == 8
    assert seen[:4] == [8, 8, 8, 8]
    assert proposer.wrong == 0
    assert proposer.rounds > 0


def test_it_stops_where_its_own_context_ends():
    runner, _, proposer, scheduler = engine(draft_len=32)
    add(scheduler, {1: PROMPTS[1]}, max_tokens=60)
    assert run_all(scheduler, runner)[1] == expected_tokens(PROMPTS[1], 60)
    assert 0 < proposer.rounds <= 32


def test_a_row_that_fails_in_the_draft_model_is_drafted_for_no_more_than_it_can():
    runner, small, proposer, scheduler = engine()
    add(scheduler, {1: PROMPTS[1], 2: PROMPTS[2]})
    small.row_errors = {1: "not finite"}
    tokens = run_all(scheduler, runner)
    assert tokens == {i: expected_tokens(PROMPTS[i], 24) for i in (1, 2)}
    assert proposer.wrong == 0
