"""When a connection is read: uvicorn's flow control, but no further requests while many wait for their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sized

from uvicorn.protocols.http.flow_control import FlowControl

from edge.limits import MAX_PIPELINED


class Flow(FlowControl):
    """`waiting`: the requests of this connection that wait for the answer to the one before.

    A client can write them faster than any answer is made, and before anybody has asked for its key. With few of them
    it is read on: its leaving would go unseen.
    """

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if len(self._waiting) < MAX_PIPELINED:
            super().resume_reading()

    def throw_away(self) -> None:
        """Read, whoever waits: nothing that comes is listened to."""
        super().resume_reading()
