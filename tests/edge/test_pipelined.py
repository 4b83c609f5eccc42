"""Requests that are sent before the one ahead of them is answered: in their order, and within bounds."""

from __future__ import annotations

import asyncio

from edge.limits import MAX_PIPELINED
from tests.edge.conftest import Edge

ECHO = b"GET /echo HTTP/1.1\r\nhost: a\r\n\r\n"
HOLD = b"GET /hold HTTP/1.1\r\nhost: a\r\n\r\n"
NUMBER = 15_000  # more than twice what one read holds


async def test_no_more_is_read_while_many_wait(door: Edge) -> None:
    client = await door.connect()
    client.writer.write(HOLD + ECHO * NUMBER)
    await door.until(lambda: len(door.connection.pipeline) >= MAX_PIPELINED)
    most = 0
    for _ in range(50):
        await asyncio.sleep(0.001)
        most = max(most, len(door.connection.pipeline))
    door.application.let_go.set()
    for _ in range(NUMBER + 1):
        answer = await client.answer()
        assert answer.status == 200
        most = max(most, len(door.connection.pipeline))
    assert most <= MAX_PIPELINED + 256 * 1024 // len(ECHO)  # what one read takes comes on top
