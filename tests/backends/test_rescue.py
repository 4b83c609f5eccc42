"""Streams that break in the middle: continued without a seam where that is possible, told apart where it is not."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from backends.anthropic import ANTHROPIC
from backends.attempt import Call
from backends.dispatch import Dispatched, StreamCut
from backends.protocol import Usage
from backends.rescue import obstacle
from bench.mock_anthropic import AnthropicWire
from bench.mock_story import CREATED, PIECES, PROMPT_TOKENS, STORY, StoryWire
from bench.mock_upstream import MockUpstream

PREFILL = [{"prefill": True}]


@pytest_asyncio.fixture
async def one() -> AsyncIterator[MockUpstream]:
    upstream = MockUpstream(StoryWire("one"))
    await upstream.start()
    yield upstream
    await upstream.stop()


@pytest_asyncio.fixture
async def two() -> AsyncIterator[MockUpstream]:
    upstream = MockUpstream(StoryWire("two"))
    await upstream.start()
    yield upstream
    await upstream.stop()


@dataclasses.dataclass
class Seen:
    """What a client and a ledger see of a stream."""

    text: str = ""
    chunks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    metered: list[Usage] = dataclasses.field(default_factory=list)
    finish: str | None = None
    done: bool = False
    cut: StreamCut | None = None

    def usage(self) -> dict[str, Any]:
        [usage] = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
        return usage


async def read(answer: Dispatched) -> Seen:
    seen = Seen()
    try:
        async for event in answer.events:
            assert not seen.done
            assert event.raw == b"data: " + event.data + b"\n\n" or event.done
            seen.done = event.done
            if event.chunk is not None:
                seen.metered += [usage] if (usage := event.usage or event.chunk.usage) else []
                chunk = msgspec.json.decode(event.data)
                seen.chunks.append(chunk)
                for choice in chunk["choices"]:
                    seen.text += choice["delta"].get("content") or ""
                    seen.finish = choice["finish_reason"] or seen.finish
    except StreamCut as cut:
        seen.cut = cut
    finally:
        await answer.aclose()
    return seen


def sent(mock: MockUpstream) -> dict[str, Any]:
    asked: dict[str, Any] = msgspec.json.decode(mock.records[-1].body)
    return asked


# What is rescued.


@pytest.mark.parametrize("after", range(1, len(PIECES)))
async def test_wherever_a_stream_is_cut_the_text_is_whole(bench, one, two, after):
    bench.pool("main", one, attempts=1)
    bench.pool("other", two)
    answer = await bench.open(f"cut,after={after}", "story@other", about=PREFILL)
    first = answer.attempt
    seen = await read(answer)
    assert (seen.text, seen.finish, seen.done, seen.cut) == (STORY, "stop", True, None)
    assert answer.rescued
    assert bench.outcomes() == ["cut", "success"]
    assert bench.observer.cut == [first]
    assert bench.observer.ended == []
    assert answer.attempt is bench.observer.started[1]
    assert answer.attempt.number == 2
    assert sent(two)["messages"][-1] == {"role": "assistant", "content": "".join(PIECES[:after]).rstrip()}


@pytest.mark.parametrize(
    "fault",
    ["cut", "end", "stall", "error", "error,code=503", "garbage", "reset", "chunking", "utf8", "drip,interval_ms=5"],
)
async def test_whatever_breaks_a_stream_the_text_is_whole(bench, one, two, fault):
    bench.pool("main", one, attempts=1, between_tokens_s=0.3)
    bench.pool("other", two)
    seen = await read(await bench.open(f"{fault},after=4", "story@other", about=PREFILL))
    assert (seen.text, seen.finish, seen.cut) == (STORY, "stop", None)
    assert bench.outcomes() == ["timeout" if fault.startswith(("stall", "drip")) else "cut", "success"]


async def test_another_replica_of_the_same_model_goes_on(bench, one, two):
    bench.pool("main", one, two)
    one.override = two.override = "cut,after=5,times=1"
    two.asked = one.asked  # whoever is asked first cuts
    seen = await read(await bench.open(about=PREFILL))
    assert seen.text == STORY
    assert one.requests == two.requests == 1


async def test_the_same_replica_goes_on_if_there_is_no_other(bench, one):
    bench.pool("main", one)
    seen = await read(await bench.open("cut,after=5,times=1", about=PREFILL))
    assert seen.text == STORY
    assert one.requests == 2


async def test_a_silent_replica_is_not_asked_to_go_on(bench, one):
    bench.pool("main", one, between_tokens_s=0.2)
    seen = await read(await bench.open("stall,after=5,times=1", about=PREFILL))
    assert seen.cut is not None
    assert one.requests == 1


async def test_a_continuation_that_breaks_is_continued(bench, one, two):
    bench.pool("main", one, attempts=1)
    bench.pool("other", two, attempts=3)
    two.override = "cut,after=4,times=2"
    answer = await bench.open("cut,after=4", "story@other", about=[{}, *PREFILL])
    seen = await read(answer)
    assert (seen.text, seen.finish) == (STORY, "stop")
    assert bench.outcomes() == ["cut", "cut", "cut", "success"]
    assert bench.observer.cut == bench.observer.started[:3]
    told = seen.usage()
    assert told["prompt_tokens"] == PROMPT_TOKENS
    assert told["completion_tokens"] >= len(PIECES)


async def test_a_continuation_that_fails_before_it_begins_is_retried_elsewhere(bench, one, two, refused_url):
    bench.pool("main", one, attempts=1)
    bench.pool("dead", refused_url, attempts=1)
    bench.pool("other", two)
    seen = await read(await bench.open("cut,after=4", "a@dead", "status,status=500,times=1@other", about=PREFILL))
    assert seen.text == STORY
    assert bench.outcomes() == ["cut", "error", "error", "success"]
    assert bench.observer.ended == bench.observer.started[1:3]


async def test_the_client_sees_one_answer_and_the_ledger_two(bench, one, two):
    bench.pool("main", one, attempts=1)
    bench.pool("other", two)
    answer = await bench.open("cut,after=6", "story@other", about=PREFILL)
    seen = await read(answer)
    first = seen.chunks[0]
    assert first["model"] == "one-model"
    for name in ("id", "model", "created", "object"):
        assert {chunk[name] for chunk in seen.chunks} == {first[name]}
    assert first["created"] == CREATED + 3
    assert all(chunk["x_kept"] == [0.7] for chunk in seen.chunks)
    assert sum("role" in choice["delta"] for chunk in seen.chunks for choice in chunk["choices"]) == 1
    # Six pieces were delivered; they and the white space at their end: ten are left. The total is what the server said.
    assert seen.usage() == {"prompt_tokens": PROMPT_TOKENS - 1, "completion_tokens": 16, "total_tokens": 27}
    [own] = seen.metered
    assert (own.prompt_tokens, own.completion_tokens) == (PROMPT_TOKENS + 5, 10)


async def test_output_limits_shrink_by_what_was_delivered(bench, one, two):
    bench.pool("main", one, attempts=1)
    bench.pool("other", two)
    payload = {"max_tokens": 10, "min_tokens": 6}
    answer = await bench.open("cut,after=3", "story@other", about=PREFILL, payload=payload)
    seen = await read(answer)
    assert (seen.text, seen.finish) == ("".join(PIECES[:10]), "length")
    assert (sent(two)["max_tokens"], sent(two)["min_tokens"]) == (7, 3)


async def test_output_limits_of_the_candidate_shrink_too(bench, one, two):
    bench.pool("main", one, attempts=1)
    bench.pool("other", two)
    answer = await bench.open("cut,after=3", "story@other", about=PREFILL, extra={"max_tokens": 5, "salt": "s"})
    assert (await read(answer)).text == "".join(PIECES[:5])
    assert sent(two)["salt"] == "s"


async def test_a_server_of_another_kind_goes_on(bench, one, two):
    two.wire = AnthropicWire()
    bench.pool("main", one, attempts=1)
    bench.pool("other", two, dialect=ANTHROPIC, api_key="k")
    answer = await bench.open("cut,after=4", "mock,chunks=2@other", about=PREFILL, payload={"max_tokens": 99})
    seen = await read(answer)
    assert seen.cut is None
    assert seen.text.startswith("".join(PIECES[:4]) + "t=")
    assert len({(chunk["id"], chunk["model"], chunk["created"]) for chunk in seen.chunks}) == 1
    assert seen.finish == "stop"
    last = sent(two)["messages"][-1]
    assert (last["role"], last["content"][0]["text"]) == ("assistant", "".join(PIECES[:4]).rstrip())
    assert sent(two)["max_tokens"] == 99 - 3
    [own] = {(usage.prompt_tokens, usage.completion_tokens) for usage in seen.metered[-1:]}
    assert own == (20, 34)


async def test_a_client_that_leaves_during_a_rescue_ends_it(bench, one, two):
    bench.pool("main", one, attempts=1)
    bench.pool("other", two)
    answer = await bench.open("cut,after=4", "hang@other", about=PREFILL)
    reader = asyncio.create_task(read(answer))
    await two.until(lambda: two.requests == 1)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await two.until(lambda: two.records[-1].outcome == "client-gone", timeout_s=1)
    assert bench.outcomes() == ["cut", "cancelled"]
    assert bench.observer.ended == bench.observer.started[1:]


async def test_a_rescue_ends_with_the_deadline_of_the_call(bench, one, two):
    bench.pool("main", one, attempts=1)
    bench.pool("other", two)
    loop = asyncio.get_running_loop()
    answer = await bench.open("cut,after=4", "hang@other", about=PREFILL, deadline=loop.time() + 0.4)
    seen = await read(answer)
    assert seen.cut is not None
    assert seen.text == "".join(PIECES[:4])
    assert bench.outcomes() == ["cut", "timeout"]


# What is not.


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ({"n": 2}, "2 choices"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "structured output"),
        ({"guided_regex": "a+"}, "structured output"),
        ({"logprobs": True}, "log probabilities"),
        ({"return_token_ids": True}, "token ids"),
    ],
)
async def test_what_has_no_seam_is_declined(bench, one, two, payload, why):
    bench.pool("main", one, attempts=1)
    bench.pool("other", two)
    seen = await read(await bench.open("cut,after=4", "story@other", about=PREFILL, payload=payload))
    assert seen.cut is not None
    assert "not continued, because" in str(seen.cut)
    assert why in str(seen.cut)
    assert two.requests == 0
    assert bench.outcomes() == ["cut"]
    assert bench.observer.cut == []  # its end is the caller's, as ever


def test_what_may_have_a_seam():
    plain = {"n": 1, "tools": [], "response_format": {"type": "text"}, "logprobs": False}
    assert obstacle(Call(plain, "chat", True, "r")) is None
    assert "completions" in str(obstacle(Call(plain, "completions", True, "r")))


async def test_without_a_model_that_can_continue_the_cut_is_reported(bench, one, two):
    bench.pool("main", one, attempts=1)
    bench.pool("other", two)
    answer = await bench.open("cut,after=4", "story@other")
    seen = await read(answer)
    assert seen.cut is not None
    assert seen.cut.kind == "disconnected"
    assert seen.text == "".join(PIECES[:4])
    assert two.requests == 0
    assert not answer.rescued


async def test_if_nobody_can_go_on_the_cut_is_reported(bench, one, two):
    bench.pool("main", one, attempts=1)
    bench.pool("other", two, attempts=1)
    for other in ("status,status=500@other", "status,status=400@other"):
        seen = await read(await bench.open("cut,after=4", other, about=[{}, {"prefill": True}]))
        assert seen.cut is not None
        assert "nobody could continue it" in str(seen.cut)
        assert seen.text == "".join(PIECES[:4])
    assert bench.observer.cut == [a for a in bench.observer.started if a.outcome == "cut"]
    assert bench.observer.ended == [a for a in bench.observer.started if a.outcome != "cut"]


@pytest.mark.parametrize("code", [400, 403])
async def test_a_refusal_in_mid_stream_is_not_a_break(bench, one, two, code):
    bench.pool("main", one, attempts=1)
    bench.pool("other", two)
    seen = await read(await bench.open(f"error,after=4,code={code}", "story@other", about=PREFILL))
    assert seen.cut is not None
    assert two.requests == 0


async def test_an_attempt_that_used_up_its_time_is_not_continued(bench, one, two):
    bench.pool("main", one, attempts=1, total_s=0.3)
    bench.pool("other", two)
    seen = await read(await bench.open("story,interval_ms=100", "story@other", about=PREFILL))
    assert seen.cut is not None
    assert seen.cut.kind == "total_timeout"
    assert two.requests == 0
