"""Two requests that are not the same never share an exact key, however much alike they look when run together.

What is folded, and nothing else: line ends and Unicode NFC in the last user turn, space around it where it is one text,
a text alone or as the one bare part, a field of a message that is null or left out.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.eligibility import Eligibility, check
from cache.key import CacheKey, build_key


def key(messages: list[Any], **fields: Any) -> CacheKey:
    return build_key({"messages": messages, **fields}, scope="team:1", model_group="m")


def turn(*texts: str, **fields: Any) -> list[dict[str, Any]]:
    """One user turn of text parts."""
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts], **fields}]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (turn("Repeat this number: 10", "00\n7"), turn("Repeat this number: 10\n00", "7")),
        (turn("Say a", "b"), turn("Say a\nb")),
        (turn("Say 10", " 00"), turn("Say 10", "00")),
        (turn("Say 10 ", "00"), turn("Say 10", "00")),
        (turn("Say a", ""), turn("Say a")),
        (turn("", "Say a"), turn("Say a", "")),
        (turn("\n"), turn("", "")),
        ([{"role": "user", "content": ""}], [{"role": "user", "content": [{"type": "text"}]}]),
        (
            [{"role": "user", "content": [{"type": "text"}, {"type": "text", "text": "x"}]}],
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text"}]}],
        ),
        (turn("hi", name="ann"), turn("hi", name="an")),
        (turn("hi\u3000"), turn("hi")),
        (turn("hi\x1f"), turn("hi")),
        (turn("ﬁne"), turn("fine")),
        (turn("x²"), turn("x2")),
        (turn("Ａ"), turn("A")),
        (
            [{"role": "system", "content": "a\n"}, *turn("hi")],
            [{"role": "system", "content": "a"}, *turn("hi")],
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, *turn("hi")],
            [{"role": "user", "content": "a\nb"}, *turn("hi")],
        ),
    ],
)
def test_texts_that_run_together_alike_are_two_requests(a: list[Any], b: list[Any]) -> None:
    assert key(a).exact != key(b).exact


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (turn("a\r\nb"), turn("a\nb")),
        (turn("a\r", "b"), turn("a\n", "b")),
        (turn(" \t\nhi\n"), turn("hi")),
        (turn("e\u0301"), turn("é")),
        (turn("\u212b"), turn("Å")),
        (turn("hi"), [{"role": "user", "content": "hi"}]),
        (turn("hi", name=None), turn("hi")),
    ],
)
def test_what_is_folded(a: list[Any], b: list[Any]) -> None:
    assert key(a).exact == key(b).exact


def test_a_salt_that_is_a_number_is_no_text() -> None:
    assert key(turn("x"), cache_salt=1).partition != key(turn("x"), cache_salt="1").partition


def test_false_is_not_zero() -> None:
    assert key(turn("x"), frequency_penalty=False).context != key(turn("x"), frequency_penalty=0).context
    assert key(turn("x"), logprobs=0).context != key(turn("x"), logprobs=False).context


def test_surrogates_are_not_the_character_that_they_would_make() -> None:
    def context(system: str) -> str:
        return key([{"role": "system", "content": system}, *turn("x")]).context

    assert context("\ud83d\ude00") != context("\U0001f600")


def test_a_turn_of_several_parts_is_found_by_itself_only() -> None:
    """No vector and no guard sees where one part ends, so other words never match."""
    payload = {"messages": turn("Repeat this number: 10", "00\n7")}
    assert check(payload, mode="semantic", allow_temperature=0) == Eligibility("exact", "several_parts")
    alone = {"messages": turn("What is the capital of France?")}
    assert check(alone, mode="semantic", allow_temperature=0).mode == "semantic"


# Few letters, so that different requests often run together alike; among them all that is folded.
texts = st.text(alphabet=["a", "e", " ", "\n", "\r", "é", "\u0301", "\u212b", "ﬁ", '"', ",", "[", "\\"], max_size=4)
parts = st.builds(
    lambda text, more: {"type": "text", "text": text, **more},
    texts,
    st.sampled_from([{}, {}, {}, {"cache_control": {"type": "ephemeral"}}]),
)
messages_of = st.builds(
    lambda role, content, more: {"role": role, "content": content, **more},
    st.sampled_from(["user", "user", "user", "assistant", "system", "developer"]),
    texts | st.lists(parts, max_size=3),
    st.sampled_from([{}, {}, {"name": "a"}, {"name": "ab"}, {"name": None}]),
)


def meaning(messages: list[dict[str, Any]]) -> str:
    """The request as the model may see it, each fold of the module's first lines applied by hand."""
    seen = []
    for number, message in enumerate(messages):
        content = message["content"]
        whole = [{"type": "text", "text": content}] if isinstance(content, str) else content
        last = number == len(messages) - 1 and message["role"] == "user"
        if last:
            texts = [
                unicodedata.normalize("NFC", part["text"].replace("\r\n", "\n").replace("\r", "\n")) for part in whole
            ]
            if len(texts) == 1:
                texts = [texts[0].strip(" \t\n")]
            whole = [{**part, "text": text} for part, text in zip(whole, texts, strict=True)]
        seen.append({**{name: value for name, value in message.items() if value is not None}, "content": whole})
    return json.dumps(seen, sort_keys=True)


@st.composite
def pairs_alike(draw: st.DrawFn) -> tuple[list[Any], list[Any]]:
    """Two requests; often the second is the first with its texts cut elsewhere."""
    first = draw(st.lists(messages_of, min_size=1, max_size=3))
    if draw(st.booleans()):
        return first, draw(st.lists(messages_of, min_size=1, max_size=3))
    last = first[-1]
    content = last["content"]
    joined = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    cuts = sorted(draw(st.lists(st.integers(0, len(joined)), max_size=2)))
    pieces = [joined[a:b] for a, b in zip([0, *cuts], [*cuts, len(joined)], strict=True)]
    if draw(st.booleans()):
        pieces = joined.split("\n")
    if draw(st.booleans()):
        pieces = [unicodedata.normalize(draw(st.sampled_from(["NFC", "NFD", "NFKC"])), piece) for piece in pieces]
    again: str | list[dict[str, str]] = [{"type": "text", "text": piece} for piece in pieces]
    return first, [*first[:-1], {**last, "content": again if draw(st.booleans()) else "".join(pieces)}]


@given(pair=pairs_alike())
def test_keys_are_equal_where_the_requests_are_and_nowhere_else(pair: tuple[list[Any], list[Any]]) -> None:
    first, second = pair
    assert (key(first).exact == key(second).exact) == (meaning(first) == meaning(second))


@given(messages=st.lists(messages_of, min_size=1, max_size=3))
def test_a_message_more_is_another_request(messages: list[Any]) -> None:
    assert key([*messages, messages[-1]]).exact != key(messages).exact
    assert key([messages[0], *messages]).exact != key(messages).exact
