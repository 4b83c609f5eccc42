"""`POST /v1/completions` before a server that has it: relayed unchanged, limited and billed like everything else."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from bench.mock_wire import OpenAIWire, Record, http_answer, sse
from gateway.dialects.openai_chat import CHAT
from gateway.dialects.openai_completions import COMPLETIONS
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door

USAGE = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}


class TextWire(OpenAIWire):
    """Text completions: one choice per prompt, in three pieces."""

    def answer(self, record: Record) -> bytes:
        choices = [{"index": i, "text": " and so on", "finish_reason": "stop"} for i in range(_count(record))]
        return http_answer(200, msgspec.json.encode({**_fields(), "choices": choices, "usage": USAGE}))

    def start(self, record: Record) -> bytes:
        return b""

    def text(self, record: Record, pad: bytes) -> bytes:
        return b"".join(_chunk(i, " and") for i in range(_count(record)))

    def finish(self, record: Record) -> bytes:
        said = b"".join(_chunk(i, " on", "stop") for i in range(_count(record)))
        if record.usage:
            said += sse(msgspec.json.encode({**_fields(), "choices": [], "usage": USAGE}))
        return said + sse(b"[DONE]")


def _count(record: Record) -> int:
    prompt = msgspec.json.decode(record.body)["prompt"]
    return 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)


def _fields() -> dict[str, Any]:
    return {"id": "cmpl-1", "object": "text_completion", "created": 1_700_000_000, "model": "text", "x_kept": 0.7}


def _chunk(index: int, text: str, finish: str | None = None) -> bytes:
    return sse(msgspec.json.encode({**_fields(), "choices": [{"index": index, "text": text, "finish_reason": finish}]}))


@pytest_asyncio.fixture
async def upstream():
    mock = MockUpstream(TextWire())
    await mock.start()
    yield mock
    await mock.stop()


@pytest_asyncio.fixture
async def door(tmp_path, upstream):
    models = {
        "text": {"tier": "small", "backend": "main", "upstream_model": "text,chunks=1", "price": PRICE},
        "narrow": {
            "tier": "medium",
            "backend": "main",
            "upstream_model": "text",
            "context_length": 256,
            "price": PRICE,
        },
        "cut": {"tier": "small", "backend": "main", "upstream_model": "cut,after=1,chunks=3", "price": PRICE},
    }
    async with front_door(tmp_path, configuration({"main": upstream}, models)) as door:
        yield door


@pytest_asyncio.fixture
async def sdk(door: FrontDoor):
    async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.token, max_retries=0) as client:
        yield client


async def test_a_completion(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(model="text", prompt="Once", max_tokens=5)
    assert answer.choices[0].text == " and so on"
    assert answer.model_extra == {"x_kept": 0.7}
    (row,) = await door.rows()
    assert (row["outcome"], row["input_tokens"], row["output_tokens"], row["usage_source"]) == (
        "success", 4, 3, "reported",
    )  # fmt: skip


async def test_a_prompt_may_be_asked_back_with_nothing_behind_it(door: FrontDoor, upstream: MockUpstream) -> None:
    body = {"model": "text", "prompt": "Once", "echo": True, "max_tokens": 0}
    response = await door.client.post("/v1/completions", json=body, headers=door.headers())
    assert response.status_code == 200, response.text
    sent = msgspec.json.decode(upstream.records[-1].body)
    assert (sent["max_tokens"], sent["echo"]) == (0, True)
    (row,) = await door.rows()
    assert row["outcome"] == "success"


@pytest.mark.parametrize("prompt", ["Once", ["Once", "Twice"], [1, 2, 3], [[1, 2], [3]]])
async def test_every_form_of_a_prompt_streams(door: FrontDoor, sdk: openai.AsyncOpenAI, prompt: Any) -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    texts: dict[int, str] = {}
    last = None
    async for chunk in await sdk.completions.create(model="text", prompt=prompt, max_tokens=5, **options):
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    count = 2 if prompt in (["Once", "Twice"], [[1, 2], [3]]) else 1
    assert texts == dict.fromkeys(range(count), " and on")
    assert last is not None
    assert last.usage is not None
    assert last.model_extra["tierline"]["model"] == "text"


async def test_a_cut_is_an_error_and_counts_what_came(door: FrontDoor) -> None:
    body = {"model": "cut", "prompt": "Once", "stream": True}
    response = await door.client.post("/v1/completions", json=body, headers=door.headers())
    assert "stream_cut" in response.text
    assert "[DONE]" not in response.text
    (row,) = await door.rows()
    assert (row["outcome"], row["output_tokens"], row["usage_source"]) == ("cut", 1, "counted")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"response_format": "json"}, "response_format"),
        ({"prompt": ["x"] * 2049}, "prompt"),
        ({"prompt": [5] * 1_048_577}, "prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logprobs": 2}, "logprobs"),  # no model here has them
    ],
)
async def test_bad_input_names_the_field(door: FrontDoor, changes: dict[str, Any], param: str) -> None:
    body = {"model": "text", "prompt": "Once", **changes}
    response = await door.client.post("/v1/completions", json=body, headers=door.headers())
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


async def test_only_each_prompt_by_itself_must_fit_the_context(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(model="narrow", prompt=["Once upon a time"] * 300, max_tokens=5)
    assert len(answer.choices) == 300
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.completions.create(model="narrow", prompt=["Once", "upon a time " * 600], max_tokens=5)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    ("fields", "choices", "generated"),
    [
        ({}, 1, 1),
        ({"n": 2, "best_of": 5}, 2, 5),
        ({"beam_width": 4}, 1, 4),
        ({"n": 3, "beam_width": 4}, 3, 4),
        ({"prompt": ["a", "b"], "n": 2, "beam_width": 3}, 4, 6),
        ({"beam_width": "many"}, 1, 1),  # the server's to refuse
    ],
)
def test_what_is_generated_and_not_given_counts(fields: dict[str, Any], choices: int, generated: int) -> None:
    """A hold covers every answer that a server follows, given or not."""
    asked = COMPLETIONS.parse(msgspec.json.encode({"model": "m", "prompt": "x", **fields}))
    assert (asked.choices, asked.generated) == (choices, generated)
    if fields.keys() <= {"n", "beam_width"}:
        chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
        asked = CHAT.parse(msgspec.json.encode(chat))
        assert (asked.choices, asked.generated) == (choices, generated)
