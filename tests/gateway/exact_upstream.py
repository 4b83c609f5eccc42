"""An upstream whose money adds up: one token per event, reported as written. And what its tests share."""

from __future__ import annotations

from typing import Any

import msgspec

from bench.mock_wire import OpenAIWire, Record, http_answer, sse
from gateway.access.counters_memory import MemoryLimiter
from gateway.access.input_bound import input_bound
from tests.gateway.front_door import FrontDoor

MESSAGES = [{"role": "user", "content": "Hello there"}]
INPUT, OUTPUT = 1000, 2000  # nano-dollars per token, as in PRICE
PROMPT_TOKENS = 40
HELD_INPUT = input_bound({"messages": MESSAGES})
SLACK = 4  # nano-dollars that a hold adds for rounding


class ExactWire(OpenAIWire):
    """One token per event; plain answers as long as allowed, up to 100 tokens; usage as it was."""

    def answer(self, record: Record) -> bytes:
        asked = msgspec.json.decode(record.body)
        tokens = min(100, asked.get("max_tokens", 100))
        message = {"role": "assistant", "content": "tok " * tokens}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return http_answer(200, _json(object="chat.completion", choices=[choice], usage=_usage(tokens)))

    def text(self, record: Record, pad: bytes) -> bytes:
        return sse(_json(choices=[{"index": 0, "delta": {"content": "tok "}, "finish_reason": None}]))

    def finish(self, record: Record) -> bytes:
        finish = _json(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        return sse(finish) + sse(_json(choices=[], usage=_usage(record.events - 1))) + sse(b"[DONE]")


def _json(**fields: Any) -> bytes:
    return msgspec.json.encode({"id": "chatcmpl-1", "created": 1_700_000_000, "model": "mock", **fields})


def _usage(output: int) -> dict[str, int]:
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": output, "total_tokens": PROMPT_TOKENS + output}


def key_id(door: FrontDoor, token: str) -> str:
    return door.services.keys.authenticate(token).key_id


async def key(door: FrontDoor, **options: Any) -> str:
    """A new key that the gateway knows already."""
    token = await door.key(**options)
    await door.services.keys.refresh()
    return token


def stop_the_clock(door: FrontDoor) -> None:
    """Buckets refill no more, so that what they hold does not depend on how busy the machine is."""
    limiter = door.services.limiter
    assert isinstance(limiter, MemoryLimiter)
    now = limiter._clock()
    limiter._clock = lambda: now


async def settled_and_held(door: FrontDoor, token: str) -> tuple[int, int]:
    limiter = door.services.limiter
    assert isinstance(limiter, MemoryLimiter)
    return await limiter.balance(f"key:{key_id(door, token)}")
