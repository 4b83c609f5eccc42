"""The prefix cache beyond its own pages: what comes back is right, and what does not come back is computed."""

import pytest

from engine.messages import NewRequest
from engine.types import SamplingParams
from tests.engine.fakes import expected_tokens
from tests.engine.page_stores import DictStore, tiered_engines, wait_saved

PROMPT = list(range(1, 30))  # seven full pages of four, and one token


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def engines():
    yield from tiered_engines()


# --- between engines ------------------------------------------------------------------------------------------------


def test_an_engine_goes_on_with_a_conversation_that_another_has_had(engines):
    store = DictStore()
    first, second = engines(shared=store), engines(shared=DictStore(store.values))
    answer, cached = first.ask(1, PROMPT, max_tokens=9)
    assert (answer, cached) == (expected_tokens(PROMPT, 9), 0)
    turn = [*PROMPT, *answer, 500, 501]
    answer, cached = second.ask(1, turn)
    assert answer == expected_tokens(turn, 6)
    assert cached == 36, "nine pages, generated tokens among them, but for the token that no step has run"
    assert second.shared.counts.loaded == 9
    assert second.tiers.loads == {"whole": 1}
    assert second.runner.tokens_run == len(turn) - 36 + 5


def test_salts_seeds_and_models_stay_apart(engines):
    store = DictStore()
    engines(shared=store).ask(1, PROMPT, salt="a")
    assert engines(shared=DictStore(store.values)).ask(1, PROMPT, salt="b")[1] == 0
    assert engines(shared=DictStore(store.values), seed=b"t" * 32).ask(1, PROMPT, salt="a")[1] == 0
    assert engines(shared=DictStore(store.values)).ask(1, PROMPT, salt="a")[1] == 28


@pytest.mark.parametrize("fault", ["damaged", "cut off", "other version", "exchanged"])
def test_a_page_that_is_not_what_was_asked_for_is_computed_and_thrown_away(engines, fault):
    store = DictStore()
    engines(shared=store).ask(1, PROMPT)
    spoilt = DictStore(dict(store.values))
    spoilt.fault = fault
    engine = engines(shared=spoilt)
    assert engine.ask(1, PROMPT) == (expected_tokens(PROMPT, 6), 0)
    assert engine.shared.counts.refused == 1
    assert engine.tiers.loads == {"none": 1}
    spoilt.fault = None
    assert len(spoilt.values) == len(store.values), "what was thrown away was computed and saved again"
    assert engines(shared=DictStore(spoilt.values)).ask(1, PROMPT)[1] == 28


def test_a_hole_in_the_chain_ends_the_load_there(engines):
    store = DictStore()
    first = engines(shared=store)
    first.ask(1, PROMPT)
    text = first.scheduler.request_of(NewRequest(9, PROMPT, SamplingParams()))
    del store.values[first.cache.page_digest(text, 3)]
    second = engines(shared=store)
    assert second.ask(1, PROMPT) == (expected_tokens(PROMPT, 6), 12)
    assert second.tiers.loads == {"part": 1}


def test_a_store_that_fails_is_left_alone_for_longer_and_longer(engines):
    store, clock = DictStore(), Clock()
    store.fault = "fails"
    engine = engines(shared=store, clock=clock)
    for number in range(1, 4):
        assert engine.ask(number, [number, *PROMPT]) == (expected_tokens([number, *PROMPT], 6), 0)
    assert store.asked == 1
    assert engine.tiers.loads == {"none": 1, "skipped": 2}
    assert engine.shared.counts.failures == 1
    assert engine.shared.counts.dropped > 0, "nothing is copied for a store that is away"
    clock.now += 1.1
    engine.ask(4, [4, *PROMPT])
    clock.now += 1.1
    engine.ask(5, [5, *PROMPT])
    assert store.asked == 2, "two seconds by now"
    store.fault = None
    clock.now += 1.1
    engine.ask(6, [6, *PROMPT])
    assert store.asked == 3
    assert engine.shared.counts.saved > 0


def test_a_bug_in_a_store_harms_nobody(engines):
    store = DictStore()
    store.fault = "bug"
    engine = engines(shared=store)
    assert engine.ask(1, PROMPT) == (expected_tokens(PROMPT, 6), 0)


# --- after a preemption ---------------------------------------------------------------------------------------------


def preempted(engine):
    """Request 2 of an engine that has room for one long answer: it gave way, its pages are gone from the cache, and
    request 1 has ended. Returns its prompt."""
    other = [100 + token for token in PROMPT]
    engine.add(NewRequest(1, PROMPT, SamplingParams(max_tokens=39)))
    engine.add(NewRequest(2, other, SamplingParams(max_tokens=30)))
    while not engine.scheduler.stats.preemptions:
        engine.turn()
    assert [request.request_id for request in engine.scheduler.requests()] == [1, 2]
    while any(request.request_id == 1 for request in engine.scheduler.requests()):
        assert engine.step()
    text = engine.scheduler.request_of(NewRequest(9, other, SamplingParams()))
    assert engine.cache.find(text, 7) == []
    for tier in engine.tiers.tiers:
        wait_saved(tier)
    return other


@pytest.mark.parametrize("place", ["shared", "host"])
def test_who_was_preempted_gets_its_pages_back(engines, place):
    store = DictStore(knows=place == "host")
    engine = engines(**{place: store}, num_blocks=18)
    other = preempted(engine)
    computed = engine.runner.tokens_run
    generated = len(engine.tokens[2])
    engine.run()
    assert engine.tokens[1] == expected_tokens(PROMPT, 39)
    assert engine.tokens[2] == expected_tokens(other, 30)
    tier = engine.host if place == "host" else engine.shared
    assert tier.counts.loaded > 0
    missing = len(other) + generated - 4 * tier.counts.loaded
    assert engine.runner.tokens_run - computed == missing + 30 - generated - 1, "what came back was not computed"
    assert missing <= 4, "all its full pages"


def test_who_was_preempted_starts_without_them_when_they_are_late(engines):
    store, clock = DictStore(), Clock()
    engine = engines(shared=store, clock=clock, num_blocks=18)
    other = preempted(engine)
    store.gate.clear()
    asked = store.asked
    engine.admit_loaded()
    while store.asked == asked:
        engine.admit_loaded()
    assert not engine.step(), "it waits, and nobody else is here"
    assert engine.scheduler.has_work
    assert engine.tiers.seconds_left() is not None
    clock.now += 2.0
    engine.admit_loaded()
    assert engine.step()
    store.gate.set()
    engine.run()
    assert engine.tokens[2] == expected_tokens(other, 30)


def test_others_run_while_one_waits_for_its_pages_and_it_may_be_given_up(engines):
    store = DictStore()
    engine = engines(shared=store, num_blocks=18)
    preempted(engine)
    store.gate.clear()
    asked = store.asked
    while store.asked == asked:
        engine.admit_loaded()
    engine.scheduler.add([NewRequest(3, [7, 8], SamplingParams(max_tokens=2))])
    while 3 not in engine.tokens:
        assert engine.step()
    engine.scheduler.abort([2])
    store.gate.set()
    engine.run()
    assert engine.tokens[3] == expected_tokens([7, 8], 2)


# --- time ---------------------------------------------------------------------------------------------------------


def test_who_has_waited_long_enough_computes_and_the_store_counts_as_away(engines):
    store, clock = DictStore(), Clock()
    engine = engines(shared=store, clock=clock)
    store.gate.clear()
    assert engine.add(NewRequest(1, PROMPT, SamplingParams(max_tokens=6)))
    while store.asked == 0:
        engine.admit_loaded()
    assert not engine.scheduler.has_work
    assert engine.tiers.seconds_left() == pytest.approx(2.0)
    clock.now += 2.0
    engine.admit_loaded()
    assert engine.scheduler.has_work
    assert engine.tiers.loads == {"late": 1}
    while engine.scheduler.has_work:
        engine.step()
    assert engine.tokens[1] == expected_tokens(PROMPT, 6)
    assert not engine.shared.is_up
    assert not engine.add(NewRequest(2, PROMPT[3:], SamplingParams(max_tokens=1))), "nobody waits for it now"
    store.gate.set()
    engine.run()


def test_what_has_come_in_time_is_used(engines):
    values = DictStore()
    engines(shared=values).ask(1, PROMPT)
    clock = Clock()
    store = DictStore(values.values)
    engine = engines(shared=store, clock=clock)
    real = store.load

    def slow(keys):
        found = real(keys)
        if store.asked == 2:
            store.gate.clear()
        return found

    store.load = slow
    engine.add(NewRequest(1, PROMPT, SamplingParams(max_tokens=6)))
    while engine.cache.stats.evicted_pages + engine.cache.pool.num_cached < 4:
        engine.admit_loaded()
    clock.now += 2.0
    engine.admit_loaded()
    store.gate.set()
    engine.run()
    assert engine.tokens[1] == expected_tokens(PROMPT, 6)
    assert engine.cached[1] == 16
    assert engine.tiers.loads == {"late": 1}


def test_the_wait_is_no_longer_than_computing_would_take(engines):
    store, clock = DictStore(), Clock()
    engine = engines(shared=store, clock=clock)
    engine.tiers.computed(16, 100.0)
    store.gate.clear()
    engine.add(NewRequest(1, PROMPT, SamplingParams(max_tokens=1)))
    assert engine.tiers.seconds_left() == pytest.approx(2.0), "a step of few tokens says nothing"
    engine.tiers.computed(100, 1.0)
    engine.add(NewRequest(2, PROMPT[1:], SamplingParams(max_tokens=1)))
    clock.now += 1.9
    store.gate.set()
    engine.run()
    engine.tiers.computed(100, 1.0)
    store.gate.clear()
    engine.add(NewRequest(3, PROMPT[2:], SamplingParams(max_tokens=1)))
    assert engine.tiers.seconds_left() == pytest.approx(0.24), "six pages of four tokens, at 100 tokens a second"
    store.gate.set()
    engine.run()


def test_what_computes_faster_than_it_comes_is_not_asked_for_until_it_is_time_to_try_again(engines):
    values = DictStore()
    engines(shared=values).ask(1, PROMPT)
    clock = Clock()
    store = DictStore(values.values)
    engine = engines(shared=store, clock=clock)
    engine.tiers.computed(100, 0.1)  # 4 ms a page
    real = store.load

    def slow(keys):
        clock.now += 0.02
        return real(keys)

    store.load = slow
    assert engine.ask(1, PROMPT)[0] == expected_tokens(PROMPT, 6)
    asked = store.asked
    for number in range(2, 5):
        engine.ask(number, [number, *PROMPT])
    assert store.asked == asked
    assert engine.tiers.loads["skipped"] == 3
    clock.now += 31
    engine.ask(5, [5, *PROMPT])
    assert store.asked == asked + 1


def test_threads_that_hang_are_not_given_more(engines):
    store, clock = DictStore(), Clock()
    engine = engines(shared=store, clock=clock)
    store.gate.clear()
    for number in range(1, 5):
        engine.add(NewRequest(number, [number, *PROMPT], SamplingParams(max_tokens=1)))
    while store.asked < 4:
        engine.admit_loaded()
    clock.now += 2.0
    engine.admit_loaded()
    assert engine.tiers.loads == {"late": 4}
    clock.now += 100.0
    assert engine.shared.is_up
    assert not engine.add(NewRequest(5, [5, *PROMPT], SamplingParams(max_tokens=1)))
    store.gate.set()
    engine.run()


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_what_waits_to_be_saved_is_bounded(engines, monkeypatch):
    monkeypatch.setattr("engine.transfer.courier.MOST_QUEUED_BYTES", 3 * 32)
    store = DictStore()
    engine = engines(shared=store)
    store.gate.clear()
    store.load = lambda keys: [None for _ in keys]
    engine.add(NewRequest(1, PROMPT, SamplingParams(max_tokens=1)))
    while engine.scheduler.has_work or len(engine.tiers):
        engine.admit_loaded()
        if engine.scheduler.has_work:
            engine.step()
    assert engine.shared.counts.dropped == 4
    assert engine.memory.reads == 3, "what is not kept is not copied either"
    store.gate.set()
    wait_saved(engine.shared)
    assert len(store.values) == 3


def test_more_than_may_wait_do_not(engines):
    engine = engines(shared=DictStore())
    engine.tiers._max_waiting = 1
    engine.shared.store.gate.clear()
    assert engine.add(NewRequest(1, PROMPT, SamplingParams(max_tokens=1)))
    assert not engine.add(NewRequest(2, PROMPT[1:], SamplingParams(max_tokens=1)))
    engine.shared.store.gate.set()
    engine.run()


def test_a_fetch_does_not_run_ahead_of_the_loop(engines, monkeypatch):
    values = DictStore()
    engines(shared=values).ask(1, PROMPT)
    monkeypatch.setattr("engine.transfer.tiers._MOST_AHEAD_BYTES", 2 * 32)
    store = DictStore(values.values)
    engine = engines(shared=store)
    engine.add(NewRequest(1, PROMPT, SamplingParams(max_tokens=6)))
    [wait] = engine.tiers._loading.values()
    while wait.load.num_brought < 2:
        select_nothing = engine.tiers.seconds_left()
        assert select_nothing is not None
    assert store.asked == 1, "two pages are here, and nobody has taken them"
    engine.run()
    assert (engine.tokens[1], engine.cached[1]) == (expected_tokens(PROMPT, 6), 28)


# --- who waits -----------------------------------------------------------------------------------------------------


def test_answers_to_one_prompt_and_equal_prompts_load_it_once(engines):
    values = DictStore()
    engines(shared=values).ask(1, PROMPT)
    store = DictStore(values.values)
    engine = engines(shared=store)
    params = SamplingParams(max_tokens=6)
    engine.add(*(NewRequest(i, PROMPT, params, None, 1) for i in (1, 2, 3)))
    engine.add(NewRequest(4, [*PROMPT, 77], params))
    engine.run()
    assert engine.shared.counts.loaded == 7
    assert all(engine.tokens[i] == expected_tokens(PROMPT, 6) for i in (1, 2, 3))
    assert engine.tokens[4] == expected_tokens([*PROMPT, 77], 6)


def test_those_who_leave_while_they_wait_are_forgotten(engines):
    store = DictStore()
    engine = engines(shared=store)
    store.gate.clear()
    params = SamplingParams(max_tokens=2)
    engine.add(NewRequest(1, PROMPT, params), NewRequest(2, PROMPT, params))
    engine.add(NewRequest(3, PROMPT[1:], params))
    engine.tiers.leave([2, 3, 99])
    assert [request.request_id for request in engine.tiers.requests()] == [1]
    store.gate.set()
    engine.run()
    assert set(engine.tokens) == {1}


def test_with_a_seed_or_for_scores_nobody_looks(engines):
    store = DictStore()
    engine = engines(shared=store)
    assert not engine.add(NewRequest(1, PROMPT, SamplingParams(seed=1, max_tokens=1)))
    assert not engine.add(NewRequest(2, PROMPT, SamplingParams(prompt_logprobs=0, max_tokens=1)))
    assert not engine.add(NewRequest(3, [1, 2, 3, 4], SamplingParams(max_tokens=1))), "no page that it could take over"
    engine.run()
    assert store.asked == 0


def test_nothing_of_a_step_that_failed_is_kept(engines):
    store = DictStore()
    engine = engines(shared=store)
    engine.scheduler.add([NewRequest(1, PROMPT, SamplingParams(max_tokens=1))])
    engine.step(fails=True)
    engine.run()
    assert store.values == {}
