"""The first request with a key: what it answers goes into a recording, and its own client follows that like any other.

So the request runs at its own pace and to its end, though its client reads slowly or leaves: for `finish_s` longer,
then it is cancelled unless another client has joined. An answer that becomes too large to keep goes straight to the
client instead, and the client's leaving ends it, as without a key.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from gateway.http import ASGIMessage, ClientGone, Header
from gateway.idempotency.answers import Answers
from gateway.idempotency.recording import Broken, Recording, Released, State, TooLarge, headers_of

if TYPE_CHECKING:
    from gateway.life import Life

# How often it is looked whether an answer that its own client has left is still followed by another.
_LOOK_AGAIN_S: Final = 1.0


class Recorder:
    """Made when the request is known to be the first; `close` is called when it has ended, however it did."""

    def __init__(
        self, life: Life, id: str, recording: Recording, answers: Answers, finish_s: float, extra: tuple[Header, ...]
    ) -> None:
        """`extra`: headers that only this request's own client gets."""
        self._life = life
        self._id = id
        self._recording = recording
        self._answers = answers
        self._finish_s = finish_s
        self._extra = extra
        self._alone = False  # its own client has left
        self._timer: asyncio.TimerHandle | None = None
        self._to_client = life.exchange.detach(self._send, self._client_left)
        self._delivery = asyncio.create_task(self._deliver(), name="deliver")

    async def close(self) -> None:
        """Wait until the client has everything. An answer without an end is one that nobody gets again."""
        if self._timer is not None:
            self._timer.cancel()
        if self._recording.running:
            self._end("gone")
        try:
            await asyncio.wait((self._delivery,))
        except asyncio.CancelledError:  # the time to drain is over: the server breaks off who still does not read
            await asyncio.wait((self._delivery,))
        self._life.exchange.attach(self._to_client)
        if not self._delivery.cancelled() and (error := self._delivery.exception()) is not None:
            raise error

    async def _send(self, message: ASGIMessage) -> None:
        """The ASGI `send` of the request that runs."""
        recording, life = self._recording, self._life
        if message["type"] == "http.response.start":
            recording.begin(message, refused=life.error is not None and life.attempt is None)
            return
        data = message.get("body", b"")
        if recording.state == "running" and data:
            if self._answers.room(recording, len(data)):
                recording.add(data)
            else:
                await self._lose()
        if recording.state == "lost":
            await self._to_client(message)
        if not message.get("more_body", False):
            self._end(self._outcome())

    def _outcome(self) -> State:
        whole = self._life.error is None
        if self._recording.state == "lost":
            return "too_large" if whole else "gone"
        if whole:
            return "whole"
        return "refused" if self._recording.refused else "failed"

    def _end(self, state: State) -> None:
        self._recording.end(state)
        self._answers.close(self._id, self._recording)

    async def _lose(self) -> None:
        """Keep nothing from here on. What is there, the client gets before what follows.

        Raises:
            ClientGone: the client has left, so that nobody gets the answer.
        """
        self._recording.end("lost")
        await asyncio.wait((self._delivery,))
        self._recording.clear()
        self._answers.forget_content(self._recording)
        if self._alone:
            self._life.exchange.gone = True
            raise ClientGone

    async def _deliver(self) -> None:
        """Give the answer to the request's own client. Ends early where it is lost: the rest goes there directly."""
        recording = self._recording
        while recording.start is None:
            if not recording.running:
                return
            await recording.changed()
        start = recording.start
        await self._to_client({**start, "headers": [*headers_of(start), *self._extra]})
        try:
            async for piece in recording.pieces():
                await self._to_client({"type": "http.response.body", "body": piece, "more_body": True})
        except (Broken, Released, TooLarge):
            return
        await self._to_client({"type": "http.response.body", "body": b"", "more_body": False})

    def _client_left(self) -> None:
        self._alone = True
        self._delivery.cancel()
        if self._recording.state == "lost":
            self._life.exchange.leave()
        elif self._recording.state == "running":
            self._timer = asyncio.get_running_loop().call_later(self._finish_s, self._abandon)

    def _abandon(self) -> None:
        if self._recording.followed:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._abandon)
        else:
            self._life.exchange.leave()
