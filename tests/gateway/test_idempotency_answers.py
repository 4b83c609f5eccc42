"""The answers a process remembers: whatever happens, they stay within their bounds, and nothing is counted twice."""

from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from gateway.idempotency.answers import ANSWER_SHARE, ENTRY_BYTES, Answers
from gateway.idempotency.recording import PART_BYTES, PIECE_BYTES, Recording

TTL_S = 60.0
MAX_ENTRIES = 5
MAX_BYTES = 400_000


class Bounds(RuleBasedStateMachine):
    """Random lives of answers, against what a plain list of them says."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.answers = Answers(TTL_S, MAX_ENTRIES, MAX_BYTES, clock=lambda: self.now)
        self.open: dict[str, Recording] = {}
        self.kept: dict[str, tuple[float, Recording]] = {}
        self.sizes: dict[str, int] = {}
        self.number = 0

    @rule(target=running)
    def begin(self) -> str:
        self.number += 1
        id = f"id-{self.number}"
        assert self.answers.find(id) is None
        self.open[id] = Recording(f"req-{id}", "print")
        self.sizes[id] = 0
        self.answers.open(id, self.open[id])
        return id

    @rule(id=running, size=st.integers(1, 3 * PIECE_BYTES // 2))
    def grow(self, id: str, size: int) -> None:
        recording = self.open[id]
        if recording.state == "running" and self.answers.room(recording, size):
            recording.add(b"x" * size)
            self.sizes[id] += size
            assert self.sizes[id] <= MAX_BYTES // ANSWER_SHARE
        elif recording.state == "running":
            recording.end("lost")
            recording.clear()
            self.answers.forget_content(recording)

    @rule(target=running, id=consumes(running), whole=st.booleans())
    def end(self, id: str, whole: bool) -> object:
        recording = self.open.pop(id)
        lost = recording.state == "lost"
        recording.end(("too_large" if lost else "whole") if whole else ("gone" if lost else "failed"))
        self.answers.close(id, recording)
        if whole:
            self.kept[id] = (self.now + TTL_S, recording)
        return multiple()

    @rule(seconds=st.floats(0.5, 30))
    def pass_(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def look(self) -> None:
        """What is found has its content; what is running is always found; what is over is not; the newest stays."""
        for id, recording in self.open.items():
            assert self.answers.find(id) is recording
        newest = list(self.kept)[-1:]
        for id, (until, recording) in self.kept.items():
            found = self.answers.find(id)
            assert found in (None, recording)
            if until <= self.now:
                assert found is None
            elif found is not None and recording.state == "whole":
                content, position = b"", 0
                while (piece := recording.take(position))[0]:
                    content, position = content + piece[0], piece[1]
                assert len(content) == self.sizes[id]
        if newest and not self.open and self.kept[newest[0]][0] > self.now:
            assert self.answers.find(newest[0]) is not None

    @invariant()
    def within_bounds(self) -> None:
        assert len(self.answers) <= MAX_ENTRIES
        # Heads of requests that run are as many as the requests; nothing else goes beyond the bound.
        assert self.answers.bytes <= MAX_BYTES + ENTRY_BYTES * len(self.open)

    @invariant()
    def nothing_leaks(self) -> None:
        known = [*self.answers._running.values(), *(recording for _, recording in self.answers._kept.values())]
        assert self.answers.bytes == sum(recording.bytes for recording in known)
        for recording in known:
            held = sum(len(part) + PART_BYTES for part in recording._parts)
            assert held <= recording.bytes


TestBounds = Bounds.TestCase
TestBounds.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


async def test_followers_wait_for_what_is_added_and_share_it() -> None:
    recording = Recording("req-1", "print")

    async def follow() -> tuple[int, bytes]:
        start = await recording.begun()
        return start["status"], b"".join([piece async for piece in recording.pieces()])

    followers = [asyncio.create_task(follow()) for _ in range(3)]
    await asyncio.sleep(0)
    followers.pop().cancel()
    recording.begin({"type": "http.response.start", "status": 200, "headers": []}, refused=False)
    whole = b"0123456789" * 20_000
    for first in range(0, len(whole), 70_000):
        recording.add(whole[first : first + 70_000])
        await asyncio.sleep(0)
    recording.end("whole")
    assert [await follower for follower in followers] == [(200, whole)] * 2
    assert await follow() == (200, whole)
