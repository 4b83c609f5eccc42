"""Answers read to their end."""

from __future__ import annotations

from backends.dispatch import Dispatched, Event


async def drain(answer: Dispatched) -> str:
    """The text of a stream; its end must be `[DONE]`."""
    text, done = "", False
    async for event in answer.events:
        assert not done
        done = event.done
        if event.chunk:
            text += "".join(choice.delta.content or "" for choice in event.chunk.choices)
    assert done
    return text


async def collect(answer: Dispatched, events: list[Event]) -> None:
    async for event in answer.events:
        events.append(event)  # noqa: PERF401 - what came before a break must remain
