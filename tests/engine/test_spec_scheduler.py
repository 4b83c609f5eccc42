"""Drafts in the scheduler: what a run may hold, who pays for it, and what becomes of a proposer that fails."""

import logging

import pytest

from engine.messages import NewRequest
from engine.spec.speculator import Speculator
from engine.types import FinishReason, RowResult, SamplingParams
from tests.engine.fakes import EOS, Clairvoyant, FakeRunner, expected_tokens, make_scheduler, run_all, step

PROMPT = [5, 6, 7]


def new(request_id=1, prompt=PROMPT, max_tokens=30, **params):
    return NewRequest(request_id, list(prompt), SamplingParams(max_tokens=max_tokens, **params))


def engine(drafts=4, *, proposer=None, runner=None, **options):
    runner = runner or FakeRunner(num_blocks=60)
    return runner, make_scheduler(
        runner, speculator=Speculator(proposer or Clairvoyant(), drafts, adaptive=False), **options
    )


def test_right_drafts_save_steps_and_change_nothing():
    runner, scheduler = engine(max_num_batched_tokens=32)
    scheduler.add([new(1), new(2, [9, 9], logprobs=1)])
    outputs = []
    while scheduler.has_work:
        outputs += step(scheduler, runner)
    for request_id, prompt in ((1, PROMPT), (2, [9, 9])):
        own = [output for output in outputs if output.request_id == request_id]
        tokens = [token for output in own for token in output.token_ids]
        assert tokens == expected_tokens(prompt, 30)
        # 30 tokens: one with the prompt, then five per step while there is room for four drafts.
        assert [len(output.token_ids) for output in own] == [1, 5, 5, 5, 5, 5, 4]
        assert sum(output.accepted_drafts for output in own) == 30 - 7
        assert sum(output.rejected_drafts for output in own) == 0
        assert own[-1].finish_reason is FinishReason.LENGTH
    logprobs = [entry.token_id for output in outputs if output.request_id == 2 for entry in output.logprobs]
    assert logprobs == expected_tokens([9, 9], 30)
    stats = scheduler.speculator.stats
    assert (stats.runs, stats.drafted_tokens, stats.accepted_tokens) == (12, 46, 46)
    assert scheduler.stats.generated_tokens == 60
    assert scheduler.stats.prefill_tokens == len(PROMPT) + 2 - 2


@pytest.mark.parametrize("wrong_from", [0, 1, 3])
def test_what_follows_a_wrong_draft_is_dropped_with_its_pages(wrong_from):
    class Wrong(Clairvoyant):
        def propose(self, counts):
            drafts = super().propose(counts)
            return {r: [*d[:wrong_from], *(t + 1 for t in d[wrong_from:])] for r, d in drafts.items()}

    runner, scheduler = engine(proposer=Wrong())
    scheduler.add([new()])
    step(scheduler, runner)
    outputs = step(scheduler, runner)
    assert [len(output.token_ids) for output in outputs] == [wrong_from + 1]
    assert (outputs[0].accepted_drafts, outputs[0].rejected_drafts) == (wrong_from, 4 - wrong_from)
    (request,) = scheduler.requests()
    assert request.num_computed_tokens == request.num_tokens - 1 == 4 + wrong_from
    assert len(request.block_table) == scheduler.cache.pages_for(request.num_tokens)
    assert run_all(scheduler, runner)[1] == expected_tokens(PROMPT, 30)[2 + wrong_from :]


def end_at(scheduler, tokens, drafts, **params):
    """The output of a step whose row yields `tokens`, after one token that the prompt's step yields."""
    scheduler.add([new(**params)])
    scheduler.update(plan := scheduler.schedule(), [RowResult(r.request_id, (40,)) for r in plan.rows])
    plan = scheduler.schedule()
    assert plan.rows[0].num_drafts == drafts
    (output,) = scheduler.update(plan, [RowResult(1, tuple(tokens))])
    scheduler.check()
    return output


def test_an_end_inside_an_accepted_run_cuts_it():
    _, scheduler = engine()
    output = end_at(scheduler, [50, 51, EOS, 52, 53], 4)
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([50, 51, EOS], FinishReason.STOP, EOS)
    assert (output.accepted_drafts, output.rejected_drafts) == (3, 1)
    assert not scheduler.has_work
    assert scheduler.cache.pool.num_used == 0


def test_a_stop_token_is_looked_for_at_every_place_of_a_run():
    _, scheduler = engine()
    output = end_at(scheduler, [50, 51, EOS], 4, stop_token_ids=frozenset({51}))
    assert (output.token_ids, output.stop_token_id) == ([50, 51], 51)


def test_ignore_eos_and_min_tokens_hold_inside_a_run():
    _, scheduler = engine()
    assert end_at(scheduler, [EOS, 51, 52], 4, ignore_eos=True).finish_reason is None
    _, scheduler = engine()
    # With the prompt's token that is the 2nd, 3rd and 4th of at least 4.
    output = end_at(scheduler, [EOS, EOS, EOS, 52], 4, min_tokens=4)
    assert (output.token_ids, output.finish_reason) == ([EOS] * 3, FinishReason.STOP)


def test_no_more_drafts_than_the_answer_has_room_for():
    _, scheduler = engine()
    output = end_at(scheduler, [50, 51, 52], 2, max_tokens=4)
    assert (output.token_ids, output.finish_reason) == ([50, 51, 52], FinishReason.LENGTH)


def test_a_runner_that_returns_too_much_fails_that_request():
    _, scheduler = engine()
    output = end_at(scheduler, [50, 51, 52, 53], 2, max_tokens=4)
    assert output.token_ids == [50, 51, 52], "cut at the limit before it is counted"
    _, scheduler = engine()
    output = end_at(scheduler, [50] * 7, 4)
    assert output.finish_reason is FinishReason.ERROR
    assert "7 tokens for a row that yields 1 to 5" in output.error


def test_drafts_take_what_decode_leaves_and_prompts_keep_half_of_it():
    runner, scheduler = engine(max_num_batched_tokens=10, max_num_seqs=4)
    scheduler.add([new(1), new(2, [8])])
    step(scheduler, runner)
    scheduler.add([new(3, range(1, 40))])
    plan = scheduler.schedule()
    lengths = {row.request_id: len(row.token_ids) for row in plan.rows}
    assert lengths == {1: 5, 2: 1, 3: 4}, "of 8 tokens beside the two that must be, at most 4 are drafts"
    scheduler.update(plan, runner.execute(plan))
    assert run_all(scheduler, runner)[3] == expected_tokens(list(range(1, 40)), 30)


def test_nobody_is_preempted_and_no_start_is_delayed_for_drafts():
    # 16 pages of 4 tokens: both requests fit to their ends exactly, drafts never do beside them.
    def history(drafts):
        runner = FakeRunner(num_blocks=17, max_model_len=32)
        speculator = Speculator(Clairvoyant(0.3), 5, adaptive=False) if drafts else None
        scheduler = make_scheduler(runner, speculator=speculator)
        scheduler.add([new(i, [i] * 4, max_tokens=28) for i in (1, 2)])
        tokens = run_all(scheduler, runner)
        return tokens, scheduler.stats.preemptions, runner.steps

    (plain, none, steps), (fast, preemptions, fewer) = history(False), history(True)
    assert plain == fast
    assert none == preemptions == 0
    assert fewer < steps


def test_drafts_make_do_with_the_pages_that_are_left():
    runner = FakeRunner(num_blocks=4, block_size=4, max_model_len=12)  # 3 pages, 12 tokens
    _, scheduler = engine(8, runner=runner)
    scheduler.add([new(1, [1, 2], max_tokens=10)])
    assert run_all(scheduler, runner)[1] == expected_tokens([1, 2], 10)
    assert scheduler.stats.preemptions == 0


@pytest.mark.parametrize("place", ["offers", "propose"])
def test_a_proposer_that_fails_is_switched_off_and_the_answer_goes_on(place, caplog):
    class Breaks(Clairvoyant):
        calls = 0

        def offers(self, requests, most):
            self.calls += 1
            if place == "offers" and self.calls == 3:
                raise RuntimeError("out of memory")
            return super().offers(requests, most)

        def propose(self, counts):
            if place == "propose" and self.calls == 3:
                raise RuntimeError("out of memory")
            return super().propose(counts)

    proposer = Breaks()
    runner, scheduler = engine(proposer=proposer)
    scheduler.add([new()])
    with caplog.at_level(logging.ERROR):
        assert run_all(scheduler, runner)[1] == expected_tokens(PROMPT, 30)
    assert proposer.calls == 3
    assert "switched off" in caplog.text


def test_pages_of_rejected_drafts_are_never_found_by_others():
    """A second request with the text that was drafted wrongly must compute it itself: `FakeRunner` would tell."""
    runner, scheduler = engine(proposer=Clairvoyant(0.7, seed=4), max_num_batched_tokens=32)
    for number in range(30):
        prompt = [1 + number % 2] * (number % 7 + 1)
        scheduler.add([new(number, prompt, max_tokens=20)])
        tokens = run_all(scheduler, runner)[number]
        assert tokens == expected_tokens(prompt, 20)
        scheduler.add([new(1000 + number, [*prompt, *tokens[:9]], max_tokens=5)])
        assert run_all(scheduler, runner)[1000 + number] == tokens[9:14]
    assert scheduler.cache.stats.hit_tokens > 0
    assert 0 < scheduler.speculator.stats.accepted_tokens < scheduler.speculator.stats.drafted_tokens
