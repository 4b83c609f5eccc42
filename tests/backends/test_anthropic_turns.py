"""Conversations as an Anthropic server takes them: text, images, documents, tool calls and results, none lost."""

from __future__ import annotations

import base64
import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.anthropic_request import messages_request
from backends.anthropic_turns import tool_id
from tests.backends.anthropic_types import HELLO, decoded, refused, translated

PNG = "data:image/png;base64,iVBORw0KGgo="


def turns(*messages: Any) -> list[Any]:
    return translated(list(messages))["messages"]


def test_system_text():
    said = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
    ]
    request = translated(said)
    assert request["system"] == "Be brief.\n\nBe kind."
    assert len(request["messages"]) == 1


def test_marks_for_the_prompt_cache_stay_where_they_are():
    mark = {"type": "ephemeral", "ttl": "1h"}
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Know this.", "cache_control": mark},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a", "cache_control": mark}, {"type": "text", "text": "b"}],
        },
        {"role": "user", "content": "c", "cache_control": mark},
    ]
    request = translated(said)
    assert request["system"] == [
        {"type": "text", "text": "Be brief."},
        {"type": "text", "text": "Know this.", "cache_control": mark},
    ]
    assert request["messages"][0]["content"] == [
        {"type": "text", "text": "a", "cache_control": mark},
        {"type": "text", "text": "b"},
        {"type": "text", "text": "c", "cache_control": mark},
    ]


def test_parallel_tools_and_their_results():
    arguments = '{"z": 1.0, "a": [12345678901234567890], "a": "\\u00e4"}'
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}},
        {"id": "functions.g:1", "type": "function", "function": {"name": "g", "arguments": ""}, "index": 1},
    ]
    said = [
        *HELLO,
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls, "annotations": [], "refusal": None},
        {"role": "tool", "tool_call_id": "functions.g:1", "name": "g", "content": ""},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3"}, image(PNG)]},
        {"role": "user", "content": "And now?"},
    ]
    raw = msgspec.json.encode(messages_request({"messages": said, "max_tokens": 9}, "m", False))
    assert f'"input":{arguments}'.encode() in raw  # not a byte of them changes
    other = tool_id("functions.g:1")
    assert turns(*said)[1:] == [
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "call_1", "name": "f", "input": decoded(msgspec.Raw(arguments.encode()))},
                {"type": "tool_use", "id": other, "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": other},
                {
                    "type": "tool_result",
                    "tool_use_id": "call_1",
                    "content": [
                        {"type": "text", "text": "3"},
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG[22:]}},
                    ],
                },
                {"type": "text", "text": "And now?"},
            ],
        },
    ]


def image(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def file(data: Any, **more: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": data, **more}}


@pytest.mark.parametrize(
    ("part", "block"),
    [
        (
            image("https://example.org/a.png", detail="high"),
            {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
        ),
        (
            image("data:image/JPG;base64,/9j/"),
            {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": "/9j/"}},
        ),
        (
            file("data:application/pdf;base64,JVBERi0=", filename="a.pdf"),
            {
                "type": "document",
                "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
                "title": "a.pdf",
            },
        ),
        (
            file("data:text/plain;charset=utf-8;base64," + base64.b64encode("Größe".encode()).decode()),
            {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Größe"}},
        ),
    ],
)
def test_images_and_documents(part, block):
    assert turns({"role": "user", "content": [part, {"type": "text", "text": "?"}]})[0]["content"][0] == block


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "user", "content": [image("http://example.org/a.png")]}, ".content[0]"),
        ({"role": "user", "content": [image("data:image/svg+xml;base64,AAAA")]}, ".content[0]"),
        ({"role": "user", "content": [image("data:image/png,AAAA")]}, ".content[0]"),
        ({"role": "user", "content": [image(PNG, detail="low")]}, ".content[0].image_url.detail"),
        ({"role": "user", "content": [image(None)]}, ".content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": PNG}]}, ".content[0]"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]}, ".content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "video"}]}, ".content[1]"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}, ".content[0].x"),
        ({"role": "user", "content": [{"type": "file", "file": {"file_id": "file-1"}}]}, ".content[0]"),
        ({"role": "user", "content": [file("data:text/csv;base64,YQ==")]}, ".content[0]"),
        ({"role": "user", "content": [file("data:text/plain;base64,/w==")]}, ".content[0]"),
        ({"role": "user", "content": 7}, ".content"),
        ({"role": "user", "content": "a", "name": "Ann"}, ".name"),
        ({"role": "system", "content": [image(PNG)]}, ".content[0]"),
        ({"role": "assistant", "content": "a", "audio": {"id": "a"}}, ".audio"),
        ({"role": "assistant", "content": "a", "function_call": {"name": "f"}}, ".function_call"),
        ({"role": "function", "content": "a", "name": "f"}, ".role"),
    ],
)
def test_messages_that_the_api_cannot_take(message, where):
    assert refused(*HELLO, message).param == f"messages[1]{where}"


@pytest.mark.parametrize(
    ("call", "where"),
    [
        ({"id": "1", "type": "custom", "custom": {"name": "f", "input": ""}}, ""),
        ({"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1]"}}, ".function.arguments"),
        ({"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":'}}, ".function.arguments"),
        ({"type": "function", "function": {"name": "f", "arguments": "{}"}}, ".id"),
    ],
)
def test_tool_calls_that_the_api_cannot_take(call, where):
    assert refused(*HELLO, {"role": "assistant", "tool_calls": [call]}).param == f"messages[1].tool_calls[0]{where}"


def test_what_the_assistant_refused_is_what_it_said():
    said = [
        {"role": "assistant", "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No!"}]},
    ]
    assert turns(*HELLO, *said)[1]["content"] == [{"type": "text", "text": "No."}, {"type": "text", "text": "No!"}]


def test_earlier_reasoning_and_empty_text_are_left_out():
    said = [*HELLO, {"role": "user", "content": " \n"}, {"role": "assistant", "content": "", "reasoning_content": "hm"}]
    assert turns(*said) == translated()["messages"]
    assert refused({"role": "user", "content": " "}).param == "messages"
    assert refused({"role": "system", "content": "Be brief."}).param == "messages"


def test_a_last_message_of_the_assistant_is_continued():
    said = [*HELLO, {"role": "assistant", "content": "The Rh"}]
    assert translated(said, continue_final_message=True, add_generation_prompt=False) == translated(said)
    assert refused(*said, continue_final_message=False).param == "continue_final_message"
    assert refused(*said, add_generation_prompt=True).param == "add_generation_prompt"


# Any conversation.

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
CALL_ID = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
ARGUMENTS = st.dictionaries(
    TEXT, st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT, max_size=3
)
CONTENT = TEXT | st.lists(TEXT.map(lambda text: {"type": "text", "text": text}), max_size=3)


@st.composite
def rounds(draw: st.DrawFn) -> list[dict[str, Any]]:
    """What one side says: a user, instructions, or an assistant with its tools and their results in any order."""
    role = draw(st.sampled_from(["system", "developer", "user", "assistant", "assistant"]))
    message: dict[str, Any] = {"role": role, "content": draw(CONTENT)}
    if role != "assistant":
        return [message]
    ids = draw(st.lists(CALL_ID, max_size=3, unique=True))
    if not ids:
        return [message]
    message["tool_calls"] = [
        {
            "id": id,
            "type": "function",
            "function": {"name": "f", "arguments": msgspec.json.encode(draw(ARGUMENTS)).decode()},
        }
        for id in ids
    ]
    results = [{"role": "tool", "tool_call_id": id, "content": draw(CONTENT)} for id in draw(st.permutations(ids))]
    return [message, *results]


CONVERSATION = st.lists(rounds(), min_size=1, max_size=6).map(lambda found: list(itertools.chain(*found)))


def texts(content: Any) -> list[str]:
    parts = [content] if isinstance(content, str) else [part["text"] for part in content or []]
    return [text for text in parts if text.strip()]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(said=CONVERSATION)
def test_no_conversation_loses_anything(said):
    said = [*said, {"role": "user", "content": "And now?"}]
    request = translated(said)
    roles = [turn["role"] for turn in request["messages"]]
    assert all(one != next_ for one, next_ in itertools.pairwise(roles))
    blocks = [block for turn in request["messages"] for block in turn["content"]]
    # All text, in order: the system's, the turns', and inside the results.
    system = [text for m in said if m["role"] in ("system", "developer") for text in texts(m["content"])]
    assert request.get("system", "") == "\n\n".join(system)
    expected: list[Any] = []
    for message in said:
        if message["role"] == "tool":
            expected.append((tool_id(message["tool_call_id"]), texts(message["content"])))
        elif message["role"] in ("user", "assistant"):
            expected += texts(message["content"])
            for call in message.get("tool_calls", []):
                expected.append((tool_id(call["id"]), msgspec.json.decode(call["function"]["arguments"])))
    found: list[Any] = []
    for block in blocks:
        if block["type"] == "text":
            found.append(block["text"])
        elif block["type"] == "tool_use":
            found.append((block["id"], block["input"]))
        else:
            found.append((block["tool_use_id"], texts(block.get("content"))))
    assert found == expected
    # Every call has its result in the next turn, as the API demands.
    for one, next_ in itertools.pairwise(request["messages"]):
        asked = [block["id"] for block in one["content"] if block["type"] == "tool_use"]
        given_ = [block["tool_use_id"] for block in next_["content"] if block["type"] == "tool_result"]
        assert set(asked) <= set(given_) or not asked


@given(st.sets(CALL_ID, max_size=20))
def test_ids_stay_apart(ids):
    made = {tool_id(given) for given in ids}
    assert len(made) == len(ids)
    assert all(id.isascii() and id.replace("-", "_").replace("_", "a").isalnum() for id in made)
