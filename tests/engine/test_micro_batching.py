"""Texts to be pooled wait for company: for so many, or for so long, and nobody waits while others run."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from engine.assembly import build_scheduler
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.limits import MicroBatching
from engine.messages import Abort, Add, FrameReader, NewRequest, Ping, Pong, Step, encode_frame, from_core_decoder
from engine.models.pooling import PoolingSpec
from engine.types import FinishReason, RowResult, SamplingParams
from tests.engine.fakes import EOS, FakeRunner, make_grammars

LONG_MS = 10_000.0  # as long as may be


class PoolingRunner(FakeRunner):
    """Its vectors have one number: how many tokens the text has. `texts`: of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[list[int]] = []

    def execute(self, plan, meanwhile=lambda: None):
        self.before_step(plan)
        meanwhile()
        self.texts.append([row.request_id for row in plan.rows])
        return [
            RowResult(row.request_id, pooled=np.array([row.start + len(row.token_ids)], dtype=np.float32))
            if row.start + len(row.token_ids) == len(row.all_token_ids)
            else RowResult(row.request_id)
            for row in plan.rows
        ]


class Loop:
    """A core in a thread, and the other end of its connection."""

    def __init__(self, batching: MicroBatching, **config) -> None:
        self.runner = PoolingRunner()
        self.socket, self._theirs = socket.socketpair()
        self.socket.settimeout(20)
        settings = EngineConfig(model_path="", served_name="", **config)
        self.scheduler = build_scheduler(settings, self.runner, b"", frozenset({EOS}), pooling=PoolingSpec())
        self._core = EngineCore(self.runner, self.scheduler, self._theirs, make_grammars(), batching)
        self._frames = FrameReader()
        self._messages: list = []
        self.thread = threading.Thread(target=self._core.run)
        self.thread.start()

    def send(self, *messages) -> None:
        self.socket.sendall(b"".join(encode_frame(message) for message in messages))

    def text(self, number: int, tokens: int = 3) -> None:
        self.send(Add([NewRequest(number, [number] * tokens, SamplingParams())]))

    def receive(self):
        while not self._messages:
            payloads = self._frames.feed(self.socket.recv(65536))
            self._messages += [from_core_decoder.decode(payload) for payload in payloads]
        return self._messages.pop(0)

    def pong(self) -> Pong:
        """The loop has taken everything that was sent before."""
        self.send(Ping(1))
        while not isinstance(message := self.receive(), Pong):
            pass
        return message

    def vectors(self, count: int) -> dict[int, float]:
        found: dict[int, float] = {}
        while len(found) < count:
            if isinstance(message := self.receive(), Step):
                for output in message.outputs:
                    assert output.finish_reason is FinishReason.STOP
                    found[output.request_id] = float(np.frombuffer(output.vector, dtype="<f4")[0])
        return found

    def close(self) -> None:
        self.socket.close()
        self.thread.join(20)
        assert not self.thread.is_alive()
        self._theirs.close()


@pytest.fixture
def make_loop():
    loops = []

    def make(max_batch_size: int, max_wait_ms: float, **config) -> Loop:
        loops.append(Loop(MicroBatching(max_batch_size, max_wait_ms), **config))
        return loops[-1]

    yield make
    for loop in loops:
        loop.close()


def test_so_many_are_waited_for_and_run_in_one_step(make_loop):
    loop = make_loop(3, LONG_MS)
    loop.text(1)
    loop.text(2, 5)
    assert loop.pong().last_step_age_seconds is None, "no step has run"
    loop.text(3, 7)
    assert loop.vectors(3) == {1: 3.0, 2: 5.0, 3: 7.0}
    assert loop.runner.texts == [[1, 2, 3]]


def test_nobody_waits_longer_than_so_long(make_loop):
    loop = make_loop(64, 1.0)
    loop.text(1)
    assert loop.vectors(1) == {1: 3.0}


def test_a_batch_of_one_waits_for_nobody(make_loop):
    loop = make_loop(1, LONG_MS)
    loop.text(1)
    assert loop.vectors(1) == {1: 3.0}


def test_more_than_so_many_that_come_at_once_share_a_step(make_loop):
    loop = make_loop(2, LONG_MS)
    loop.send(*(Add([NewRequest(i, [i] * 4, SamplingParams())]) for i in range(1, 6)))
    assert loop.vectors(5) == dict.fromkeys(range(1, 6), 4.0)
    assert len(loop.runner.texts) <= 2


def test_who_comes_while_others_run_does_not_wait(make_loop):
    loop = make_loop(2, LONG_MS, max_num_batched_tokens=16, max_num_seqs=4)
    first_step, go_on = threading.Event(), threading.Event()

    def hold(plan):
        if not first_step.is_set():
            first_step.set()
            assert go_on.wait(20)

    loop.runner.before_step = hold
    loop.text(1, 100)  # both take several steps
    loop.text(2, 100)
    assert first_step.wait(20)
    loop.text(3)
    go_on.set()
    assert loop.vectors(3)[3] == 3.0


def test_who_is_given_up_while_it_waits_holds_nobody_up(make_loop):
    loop = make_loop(2, LONG_MS)
    loop.text(1)
    loop.send(Abort([1]))
    assert loop.pong().last_step_age_seconds is None
    loop.text(2)
    assert loop.pong().last_step_age_seconds is None, "it is the first again"
    loop.text(3)
    assert loop.vectors(2) == {2: 3.0, 3: 3.0}
    assert loop.scheduler.cache.pool.num_used == 0
