"""The loop of the core, driven over a real socket, in a thread, with the runner without a model."""

import select
import socket
import threading
import time

import pytest

from engine.assembly import build_scheduler
from engine.config import EngineConfig
from engine.core import MAX_CONSECUTIVE_FAILURES, EngineCore
from engine.messages import (
    MAX_FRAME_BYTES,
    Abort,
    Add,
    FrameReader,
    NewRequest,
    Pages,
    Ping,
    Pong,
    Rejected,
    Step,
    encode_frame,
    from_core_decoder,
)
from engine.types import FinishReason, RowResult, SamplingParams
from tests.engine.fakes import EOS, FakeRunner, expected_tokens, make_grammars, make_scheduler


def new(request_id, prompt, max_tokens=5, **params):
    return NewRequest(request_id, list(prompt), SamplingParams(max_tokens=max_tokens, **params))


class Peer:
    """The HTTP process's end of the connection."""

    def __init__(self, runner, **config):
        self.runner = runner
        self.overlaps = config.get("overlap", False)
        ours, theirs = socket.socketpair()
        self.socket = ours
        self.socket.settimeout(10)
        settings = EngineConfig(model_path="", served_name="", **config)
        self.scheduler = build_scheduler(settings, runner, b"", frozenset({EOS}))
        self.theirs = theirs
        self.core = EngineCore(runner, self.scheduler, theirs, make_grammars(), overlap=settings.overlap)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self._frames = FrameReader()
        self._messages: list = []
        self.thread.start()

    def _run(self):
        try:
            self.core.run()
        except Exception as error:
            self.error = error

    def send(self, *messages):
        self.socket.sendall(b"".join(encode_frame(message) for message in messages))

    def receive(self):
        while not self._messages:
            decoded = [from_core_decoder.decode(p) for p in self._frames.feed(self.socket.recv(65536))]
            self._messages += [message for message in decoded if not isinstance(message, Pages)]
        return self._messages.pop(0)

    def until(self, condition):
        """Messages up to the first one for which the condition holds."""
        seen = []
        while True:
            seen.append(self.receive())
            if condition(seen[-1]):
                return seen

    def close(self):
        self.socket.close()
        self.thread.join(10)
        self.theirs.close()
        assert not self.thread.is_alive()


@pytest.fixture(params=[False, True], ids=["in turn", "overlapping"])
def make_peer(request):
    """Each test of the loop runs twice: one step after the other, and each begun before the one before it is over."""
    peers = []

    def make(runner=None, **config):
        peers.append(Peer(runner or FakeRunner(), overlap=request.param, **config))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


def outputs(messages):
    return [output for message in messages if isinstance(message, Step) for output in message.outputs]


def finished(request_id):
    def condition(message):
        return isinstance(message, Step) and any(
            o.request_id == request_id and o.finish_reason for o in message.outputs
        )

    return condition


def test_requests_run_to_their_end_and_the_last_snapshot_shows_no_page_in_use(make_peer):
    peer = make_peer()
    peer.send(Add([new(1, [1, 2, 3]), new(2, [4], 9)]))
    messages = peer.until(finished(2))
    tokens = {i: [t for o in outputs(messages) if o.request_id == i for t in o.token_ids] for i in (1, 2)}
    assert tokens == {1: expected_tokens([1, 2, 3], 5), 2: expected_tokens([4], 9)}
    stats = messages[-1].stats
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    assert (stats.steps, stats.generated_tokens) == (9, 14)
    assert all(message.step_seconds > 0 for message in messages)


def test_an_abort_takes_effect_before_the_next_step(make_peer):
    runner = FakeRunner(num_blocks=100, max_model_len=300)
    in_step, go_on = threading.Event(), threading.Event()

    def pause(plan):
        if runner.steps == 5:
            in_step.set()
            assert go_on.wait(10)

    runner.before_step = pause
    peer = make_peer(runner)
    peer.send(Add([new(1, [1], 250), new(2, [2], 8)]))
    assert in_step.wait(10)
    peer.send(Abort([1]), Abort([1, 99]))
    go_on.set()
    messages = peer.until(finished(2))
    told = len([o for o in outputs(messages) if o.request_id == 1])
    assert told == (5 if peer.overlaps else 6), "the step in flight was the last, and yields nothing if it is not over"
    assert messages[-1].stats.aborts == 1
    assert messages[-1].stats.pages_used == 0


def test_an_abort_in_an_idle_engine_is_reported_at_once(make_peer):
    runner = FakeRunner()
    in_step, go_on = threading.Event(), threading.Event()
    runner.before_step = lambda plan: (in_step.set(), go_on.wait(10))
    peer = make_peer(runner)
    peer.send(Add([new(1, [1], 100)]))
    assert in_step.wait(10)
    peer.send(Abort([1]))
    go_on.set()
    last = peer.until(lambda m: isinstance(m, Step) and not m.stats.running)[-1]
    assert (last.stats.pages_used, last.stats.waiting) == (0, 0)


def test_a_failed_step_ends_its_requests_and_not_the_process(make_peer):
    runner = FakeRunner()

    def fail_once(plan):
        if runner.steps == 2:
            runner.steps += 1
            raise MemoryError("no room")

    runner.before_step = fail_once
    peer = make_peer(runner)
    peer.send(Add([new(1, [1])]))
    last = outputs(peer.until(finished(1)))[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert "MemoryError: no room" in last.error
    peer.send(Add([new(2, [2])]))
    messages = peer.until(finished(2))
    assert [t for o in outputs(messages) for t in o.token_ids] == expected_tokens([2], 5)
    assert messages[-1].stats.step_failures == 1


def test_steps_that_keep_failing_end_the_process(make_peer):
    runner = FakeRunner()

    def fail(plan):
        raise RuntimeError("always")

    runner.before_step = fail
    peer = make_peer(runner)
    for number in range(1, MAX_CONSECUTIVE_FAILURES + 1):
        peer.send(Add([new(number, [1])]))
        peer.until(finished(number))
    peer.thread.join(10)
    assert "steps in a row failed" in str(peer.error)


def test_a_runner_that_breaks_its_contract_ends_the_process(make_peer):
    runner = FakeRunner()
    runner.choose = lambda row, states: RowResult(12345, (1,))
    peer = make_peer(runner)
    peer.send(Add([new(1, [1])]))
    peer.thread.join(10)
    assert "do not match" in str(peer.error)


def test_the_health_echo_passes_through_the_loop(make_peer):
    runner = FakeRunner()
    in_step, go_on = threading.Event(), threading.Event()
    runner.before_step = lambda plan: (in_step.set(), go_on.wait(10))
    peer = make_peer(runner)
    peer.send(Ping(1))
    assert peer.receive() == Pong(1, None)
    peer.send(Add([new(1, [1], 2)]))
    assert in_step.wait(10)
    peer.send(Ping(2))
    peer.socket.settimeout(0.05)
    with pytest.raises(TimeoutError):
        peer.receive()  # the step hangs, and so does the echo
    peer.socket.settimeout(10)
    go_on.set()
    pong = peer.until(lambda m: isinstance(m, Pong))[-1]
    assert pong.number == 2
    assert 0 <= pong.last_step_age_seconds < 5


def test_refusals_say_whether_to_come_back(make_peer):
    runner = FakeRunner(max_model_len=20)
    in_step, go_on = threading.Event(), threading.Event()
    runner.before_step = lambda plan: (in_step.set(), go_on.wait(10))
    peer = make_peer(runner, max_num_seqs=1, max_waiting=1)
    peer.send(Add([new(1, range(1, 30))]))
    refusal = peer.receive()
    assert isinstance(refusal, Rejected)
    assert refusal.request_ids == [1]
    assert refusal.retry_after_seconds is None
    assert "29 tokens" in refusal.message
    peer.send(Add([new(2, [1])]))
    assert in_step.wait(10)
    peer.send(Add([new(3, [1])]), Add([new(4, [1])]))
    go_on.set()
    refusal = peer.until(lambda m: isinstance(m, Rejected))[-1]
    assert refusal.request_ids == [4]
    assert refusal.retry_after_seconds >= 1
    peer.until(finished(3))


def test_the_loop_ends_when_the_other_side_closes(make_peer):
    peer = make_peer()
    peer.send(Add([new(1, [1], 100)]))
    peer.receive()
    peer.socket.close()
    peer.thread.join(10)
    assert not peer.thread.is_alive()


def test_frames_survive_any_split_and_absurd_lengths_are_refused():
    data = encode_frame(Ping(7)) + encode_frame(Abort([1, 2], True)) + encode_frame(Add([new(1, [1, 2], seed=-1)]))
    whole = list(FrameReader().feed(data))
    reader = FrameReader()
    assert [payload for byte in data for payload in reader.feed(bytes([byte]))] == whole
    assert len(whole) == 3
    with pytest.raises(ValueError, match="announces"):
        list(FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big")))


def test_the_host_side_of_a_step_is_cheap():
    """Everything but the forward pass at batch 8: schedule, update, snapshot, encode. CPU time, so load beside us is
    no excuse; the bound is 1.5 ms, and it takes about a tenth of that."""
    runner = FakeRunner(num_blocks=400, block_size=16, max_model_len=600)
    scheduler = make_scheduler(runner, max_num_seqs=8, max_num_batched_tokens=512)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        core = EngineCore(runner, scheduler, theirs, make_grammars())
        scheduler.add([new(i, range(1, 129), 400) for i in range(8)])
        for _ in range(5):
            plan = scheduler.schedule()
            scheduler.update(plan, [RowResult(r.request_id, (5,) if r.sample else ()) for r in plan.rows])
        results = [RowResult(i, (5,)) for i in range(8)]
        steps = 300
        start = time.process_time()
        for _ in range(steps):
            plan = scheduler.schedule()
            encode_frame(Step(scheduler.update(plan, results), core.stats(), 0.1))
        per_step_ms = 1000 * (time.process_time() - start) / steps
    print(f"host side of a step, batch 8: {per_step_ms:.3f} ms of CPU time")
    assert per_step_ms < 1.5


def test_with_overlap_a_step_is_told_of_while_the_next_one_runs():
    runner, waiting, all_begun = FakeRunner(), [], threading.Event()

    def look(plan):  # what lies in the socket when a step begins
        readable, _, _ = select.select([peer.socket], [], [], 0)
        waiting.append(bool(readable))
        if len(waiting) == 4:
            all_begun.set()

    runner.before_step = look
    peer = Peer(runner, overlap=True)
    try:
        peer.send(Add([new(1, [1, 2, 3], 4)]))
        assert all_begun.wait(10)  # nobody reads before
        assert waiting == [False, False, True, True]  # the first step is told of within the second
        messages = peer.until(finished(1))
        assert [t for o in outputs(messages) for t in o.token_ids] == expected_tokens([1, 2, 3], 4)
    finally:
        peer.close()
