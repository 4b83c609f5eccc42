"""Streams as a server or a proxy may cut, fold and break them: what the client reads is the answer or an error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from bench.mock_wire import OpenAIWire, Record
from tests.gateway.front_door import FrontDoor, configuration, front_door

TEXT = 'Zürich 😀 一二三 "quoted"\n'
MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "mock"}


def chunk(delta: dict[str, Any] | None, finish: str | None = None, **fields: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return json.dumps({**HEAD, "choices": choices, **fields}, ensure_ascii=False).encode()


ROLE, SAID, STOP = chunk({"role": "assistant", "content": ""}), chunk({"content": TEXT}), chunk({}, "stop")
USAGE = chunk(None, usage={"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12})
ERROR = b'{"error":{"message":"out of memory","type":"server_error","code":500}}'
DONE = b"[DONE]"


class BytesWire(OpenAIWire):
    """Streams the bytes that `body` has, whatever was asked."""

    body = b""

    def start(self, record: Record) -> bytes:
        return b""

    def text(self, record: Record, pad: bytes) -> bytes:
        return b""

    def finish(self, record: Record) -> bytes:
        return b"%x\r\n%b\r\n" % (len(self.body), self.body)


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[MockUpstream]:
    mock = MockUpstream(BytesWire())
    await mock.start()
    yield mock
    await mock.stop()


@pytest_asyncio.fixture
async def door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    document = configuration({"up": upstream})
    document["backends"]["up"]["attempts"] = 1
    async with front_door(tmp_path, document) as running:
        yield running


def lines(*datas: bytes, end: bytes = b"\n") -> bytes:
    return b"".join(b"data: " + data + end + end for data in datas)


WHOLE = (ROLE, SAID, STOP, USAGE, DONE)
FORMS = {
    "LF": lines(*WHOLE),
    "CR LF": lines(*WHOLE, end=b"\r\n"),
    "CR": lines(*WHOLE, end=b"\r"),
    "no space after the colon": lines(*WHOLE).replace(b"data: ", b"data:"),
    "byte order mark": b"\xef\xbb\xbf" + lines(*WHOLE),
    "comments": b": hello\n\n"
    + lines(ROLE)
    + b": ping\n"
    + lines(SAID)
    + b":\n\n: ping\n\n"
    + lines(STOP, USAGE, DONE),
    "other fields": b"".join(b"event: message\nid: 7\nretry: 1000\n" + lines(data) for data in WHOLE),
    "several lines of data": lines(ROLE)
    + b"data: "
    + SAID.replace(b", ", b",\ndata: ")
    + b"\n\n"
    + lines(STOP, USAGE, DONE),
    "no blank line at the end": lines(*WHOLE)[:-1],
    "no [DONE]": lines(*WHOLE[:-1]),
    "usage first": lines(ROLE, USAGE, SAID, STOP, USAGE, DONE),
    "an empty chunk first": lines(chunk(None, prompt_filter_results=[]), *WHOLE),
}


@pytest.mark.parametrize("piece", [0, 1, 7])
@pytest.mark.parametrize("form", FORMS)
async def test_every_form_of_a_stream_is_read(door: FrontDoor, upstream: MockUpstream, form: str, piece: int) -> None:
    """In one piece, in pieces of seven bytes, and byte by byte: between CR and LF, within a character, in the mark."""
    assert isinstance(upstream.wire, BytesWire)
    upstream.wire.body = FORMS[form]
    upstream.override = f"answer,piece={piece}"
    async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.token, max_retries=0) as sdk:
        stream = await sdk.chat.completions.create(
            model="mock", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert [c.usage.total_tokens for c in chunks if c.usage] == [12]
    assert chunks[-1].choices == []
    (row,) = await door.rows()
    assert (row["outcome"], row["input_tokens"], row["output_tokens"]) == ("success", 7, 5)


BROKEN = {
    "error object": lines(ROLE, SAID, ERROR),
    "error object, then [DONE]": lines(ROLE, SAID, ERROR, DONE),
    "error event": lines(ROLE, SAID) + b"event: error\n" + lines(b'{"message":"out of memory"}'),
    "error as text": lines(ROLE, SAID, b'{"error":"out of memory"}'),
    "an error field of its own": lines(ROLE, SAID) + b"error: " + ERROR + b"\n\n",
    "no finish reason": lines(ROLE, SAID),
    "half an event": lines(ROLE, SAID) + b"data: " + STOP[:20],
    "not JSON": lines(ROLE, SAID, b"{oops"),
    "a character in halves": lines(ROLE, SAID, SAID.replace("ü".encode(), b"\xc3"), STOP, DONE),
}


@pytest.mark.parametrize("piece", [0, 1])
@pytest.mark.parametrize("fault", BROKEN)
async def test_no_fault_passes_for_an_end(door: FrontDoor, upstream: MockUpstream, fault: str, piece: int) -> None:
    assert isinstance(upstream.wire, BytesWire)
    upstream.wire.body = BROKEN[fault]
    upstream.override = f"answer,piece={piece}"
    response = await door.chat(stream=True)
    assert response.status_code == 200
    *events, last = [block for block in response.text.split("\n\n") if block]
    assert "[DONE]" not in response.text
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stream_cut"
    said = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(choice["delta"].get("content", "") for event in said for choice in event["choices"]) == TEXT
    assert [row["outcome"] for row in await door.rows()] == ["cut"]


async def test_of_several_prompts_each_must_end(tmp_path: Path, upstream: MockUpstream) -> None:
    """The stream breaks when one of two has ended."""
    text = (
        b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"mock","choices":[{"index":%d,"text":"a",%b}]}'
    )
    said, ended = b'"finish_reason":null', b'"finish_reason":"stop"'
    assert isinstance(upstream.wire, BytesWire)
    upstream.wire.body = lines(text % (0, said), text % (1, said), text % (0, ended))
    async with front_door(tmp_path, configuration({"up": upstream})) as door:
        body = {"model": "mock", "prompt": ["One", "Two"], "stream": True}
        response = await door.client.post("/v1/completions", json=body, headers=door.headers())
        assert "[DONE]" not in response.text
        assert "stream_cut" in response.text
        assert [row["outcome"] for row in await door.rows()] == ["cut"]
