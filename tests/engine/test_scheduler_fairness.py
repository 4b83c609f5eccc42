"""Nobody waits for long because of others: short prompts beside long ones, long ones beside a stream of short ones."""

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import NewRequest
from engine.scheduling.request import Request
from engine.types import SamplingParams
from tests.engine.fakes import FakeRunner, expected_tokens, make_scheduler, run_all, step

LONG = 1


def new(request_id: int, length: int, max_tokens: int = 3) -> NewRequest:
    """A request whose prompt has nothing in common with that of another id."""
    prompt = [request_id % 900 + 1, *((request_id * 31 + i) % 900 + 1 for i in range(length - 1))]
    return NewRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens))


def request(scheduler, request_id: int) -> Request | None:
    return next((r for r in scheduler.requests() if r.request_id == request_id), None)


def is_prefilled(scheduler, request_id: int) -> bool:
    found = request(scheduler, request_id)
    return found is None or found.num_generated_tokens > 0


def steps_until(condition, scheduler, runner, most: int, before_step=lambda: None) -> int:
    """Steps until the condition holds.

    Raises:
        AssertionError: it takes more than `most`.
    """
    for number in range(most + 1):
        if condition():
            return number
        before_step()
        step(scheduler, runner)
    raise AssertionError(f"still not after {most} steps")


def test_a_short_prompt_does_not_wait_for_a_long_one():
    runner = FakeRunner(num_blocks=400, max_model_len=1200)
    scheduler = make_scheduler(runner, max_num_batched_tokens=16)
    scheduler.add([new(LONG, 1000)])
    step(scheduler, runner)
    scheduler.add([new(2, 8)])
    assert steps_until(lambda: is_prefilled(scheduler, 2), scheduler, runner, 1) == 1
    assert request(scheduler, LONG).num_computed_tokens == 24, "the rest of that step is the long one's"
    assert run_all(scheduler, runner)[LONG] == expected_tokens(new(LONG, 1000).prompt_token_ids, 3)


def test_whose_beginning_is_cached_counts_as_short():
    runner = FakeRunner(num_blocks=800, max_model_len=1200)
    scheduler = make_scheduler(runner, max_num_batched_tokens=16)
    history = new(7, 500)
    scheduler.add([history])
    run_all(scheduler, runner)
    scheduler.add([new(LONG, 400)])
    step(scheduler, runner)
    scheduler.add([NewRequest(8, [*history.prompt_token_ids, 5, 6, 7], SamplingParams(max_tokens=1))])
    assert steps_until(lambda: is_prefilled(scheduler, 8), scheduler, runner, 1) == 1


def test_siblings_need_no_step_of_their_own():
    runner = FakeRunner(num_blocks=800, max_model_len=1200)
    scheduler = make_scheduler(runner, max_num_batched_tokens=16)
    scheduler.add([new(LONG, 400)])
    step(scheduler, runner)
    prompt = new(2, 100).prompt_token_ids
    scheduler.add([NewRequest(i, prompt, SamplingParams(max_tokens=9), group=1) for i in (2, 3)])
    assert steps_until(lambda: is_prefilled(scheduler, 2), scheduler, runner, 20) > 1
    assert is_prefilled(scheduler, 3)


def test_who_overtakes_leaves_the_pages_that_a_started_prompt_will_need():
    runner = FakeRunner(num_blocks=9, block_size=16, max_model_len=120)  # 8 pages
    scheduler = make_scheduler(runner, max_num_batched_tokens=16)
    scheduler.add([new(LONG, 100, 1)])  # 7 pages
    step(scheduler, runner)
    scheduler.add([new(i, 2, 14) for i in (2, 3, 4)])  # a page each, for long enough
    run_all(scheduler, runner)
    assert scheduler.stats.preemptions == 0


def test_equal_prompts_are_still_served_one_after_the_other():
    """Sharing among equals would make all of them as late as the last."""
    runner = FakeRunner(num_blocks=400, max_model_len=1200)
    scheduler = make_scheduler(runner, max_num_batched_tokens=16)
    scheduler.add([new(i, 160) for i in (1, 2, 3)])
    ends = {}
    for number in range(1, 40):
        for output in step(scheduler, runner):
            ends.setdefault(output.request_id, number)
    assert ends[1] == 10
    assert ends[2] <= 21
    assert ends[3] <= 31


@settings(max_examples=60, deadline=None)
@given(
    budget=st.integers(8, 40),
    rows=st.integers(2, 4),
    length=st.integers(50, 300),
    shorts=st.lists(st.integers(1, 20), min_size=1, max_size=8),
)
def test_a_stream_of_short_prompts_takes_at_most_half_from_a_long_one(budget, rows, length, shorts):
    runner = FakeRunner(num_blocks=600, max_model_len=400)
    scheduler = make_scheduler(runner, max_num_seqs=rows, max_num_batched_tokens=budget)
    scheduler.add([new(LONG, length)])
    stream = _endless(scheduler, shorts)
    # All other rows decode, and half of what they leave is the long one's.
    share = (budget - (rows - 1) + 1) // 2
    steps_until(lambda: is_prefilled(scheduler, LONG), scheduler, runner, -(-length // share), lambda: next(stream))


@settings(max_examples=60, deadline=None)
@given(
    budget=st.integers(8, 40),
    longs=st.lists(st.integers(100, 300), min_size=1, max_size=4),
    wait=st.integers(0, 5),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
)
def test_short_prompts_wait_for_shorter_ones_only(budget, longs, wait, lengths):
    runner = FakeRunner(num_blocks=2000, max_model_len=400)
    rows = len(longs) + len(lengths)
    scheduler = make_scheduler(runner, max_num_seqs=rows, max_num_batched_tokens=budget + rows)
    scheduler.add([new(i, length) for i, length in enumerate(longs, 1)])
    for _ in range(wait):
        step(scheduler, runner)
    scheduler.add([new(100 + i, length) for i, length in enumerate(lengths)])
    for number in range(1, 400):
        step(scheduler, runner)
        for i, length in enumerate(lengths):
            # A long one counts from where it has no more left than that.
            shorter = sum(n for n in lengths if n <= length) + len(longs) * length
            assert is_prefilled(scheduler, 100 + i) or number <= shorter // (budget // 2) + 1
        if all(is_prefilled(scheduler, 100 + i) for i in range(len(lengths))):
            return
    raise AssertionError("short prompts are never done")


def _endless(scheduler, lengths: list[int]) -> Iterator[None]:
    """Keeps the queue full of prompts of these lengths in turn, each `next` a refill."""
    request_id = 1000
    while True:
        while scheduler.num_waiting < 8:
            request_id += 1
            scheduler.add([new(request_id, lengths[request_id % len(lengths)], 1 + request_id % 5)])
        yield


@settings(max_examples=60, deadline=None)
@given(
    budget=st.integers(8, 40),
    rows=st.integers(2, 5),
    first=st.integers(40, 100),
    second=st.integers(40, 100),
    shorts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
)
def test_who_waits_for_pages_is_not_kept_out_by_those_who_need_fewer(budget, rows, first, second, shorts):
    """Two long prompts that do not both fit, and short ones without end that would."""
    runner = FakeRunner(num_blocks=30, max_model_len=110)  # 116 tokens
    scheduler = make_scheduler(runner, max_num_seqs=rows, max_num_batched_tokens=budget)
    scheduler.add([new(LONG, first), new(LONG + 1, second)])
    stream = _endless(scheduler, shorts)
    share = (budget - (rows - 1) + 1) // 2
    # Both prompts at the least share, and meanwhile every row taken once by the longest of the others.
    most = -(-(first + second) // share) + rows * (max(shorts) + 5) + 10
    for request_id in (LONG, LONG + 1):
        steps_until(lambda i=request_id: is_prefilled(scheduler, i), scheduler, runner, most, lambda: next(stream))
