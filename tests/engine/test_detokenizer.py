"""Streaming text: whole characters, stop strings at every alignment, tokens and text side by side."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.detokenizer import Delta, Detokenizer
from engine.types import FinishReason, TokenLogprob

TEXTS = [
    "plain text, nothing special",
    "emoji 😀🚀 and a family 👨‍👩‍👧‍👦 and a flag 🇯🇵",
    "中文、日本語、한국어 – ünïcödé",
    "𝒳𝒴 a̐éö̲ \u200d\ufeff end",
    "a real replacement character \ufffd stays",
]


class Bytes:
    """A vocabulary of the 256 bytes, some fragments, and two special tokens."""

    fragments = (b"ab", b"abc", "é".encode(), "中".encode(), b"\n\nUser:", b"r:", b" the ", b"xx", b"")
    special_ids = frozenset({1000, 1001})

    def token_bytes(self, token_id: int) -> bytes:
        if token_id >= 1000:
            return b"<|end|>" if token_id == 1000 else b"<|x|>"
        return bytes([token_id]) if token_id < 256 else self.fragments[token_id - 256]


def decode_all(ids, skip_special=True) -> str:
    vocabulary = Bytes()
    data = b"".join(vocabulary.token_bytes(i) for i in ids if not (skip_special and i in vocabulary.special_ids))
    return data.decode("utf-8", errors="replace")


def cut_at_first_stop(text: str, stops, include: bool) -> str:
    """The definition, character by character: the first character that completes a stop string, the longest one."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            return text[:end] if include else text[: end - max(map(len, completed))]
    return text


def stream(ids, splits=None, finish=FinishReason.LENGTH, logprobs=False, **options) -> list[Delta]:
    """Push tokens in groups of the given sizes (one by one by default) until the end."""
    detokenizer = Detokenizer(Bytes(), **options)
    deltas, position = [], 0
    for size in splits or [1] * len(ids):
        group = ids[position : position + size]
        position += size
        if not group:
            break
        last = position >= len(ids)
        values = [TokenLogprob(i, -float(position)) for i in group] if logprobs else None
        deltas.append(detokenizer.push(group, values, finish if last else None))
        if detokenizer.is_finished:
            break
    return deltas


def text_of(deltas) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_the_stream_equals_the_whole_and_never_splits_a_character(text, size):
    ids = list(text.encode())
    deltas = stream(ids, [size] * len(ids))
    assert text_of(deltas) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta.text for delta in deltas)
    assert [i for delta in deltas for i in delta.token_ids] == ids


def test_real_tokenizer_streams_like_it_decodes(smollm2_path):
    from engine.loader import read_info
    from engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(read_info(smollm2_path))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        detokenizer = Detokenizer(tokenizer)
        deltas = [detokenizer.push([i]) for i in ids[:-1]]
        deltas.append(detokenizer.push(ids[-1:], finish_reason=FinishReason.STOP))
        assert text_of(deltas) == tokenizer.decode(ids) == text
        assert all("\ufffd" not in d.text for d in deltas) or "\ufffd" in text


@given(st.lists(st.integers(0, 264) | st.sampled_from([1000, 1001])), st.lists(st.integers(1, 4)), st.booleans())
def test_any_tokens_in_any_groups_give_the_text_of_all(ids, splits, skip_special):
    splits = splits + [1] * len(ids)
    deltas = stream(ids, splits, skip_special=skip_special)
    assert text_of(deltas) == decode_all(ids, skip_special)
    assert [i for delta in deltas for i in delta.token_ids] == ids
    offsets = [offset for delta in deltas for offset in delta.text_offsets]
    assert len(offsets) == len(ids)
    assert offsets == sorted(offsets)


def test_an_unfinished_character_at_the_end_is_flushed_as_a_replacement():
    deltas = stream([ord("a"), 0xF0, 0x9F])
    assert [delta.text for delta in deltas] == ["a", "", "\ufffd"]


def test_a_token_comes_with_the_last_character_of_its_text():
    deltas = stream([ord("a"), *"é".encode(), ord("b")])
    assert [(d.text, d.token_ids) for d in deltas] == [
        ("a", [ord("a")]),
        ("", []),
        ("é", list("é".encode())),
        ("b", [ord("b")]),
    ]
    assert [d.text_offsets for d in deltas] == [[0], [], [1, 1], [2]]


STOP_CASES = [
    (b"one two three", ["two"]),
    (b"abababc", ["abc"]),
    (b"aaab", ["aab", "ab"]),
    (b"abc", ["b", "abc"]),
    (b"xabc", ["abc", "c"]),
    (b"no match abab", ["abc"]),
    ("中文停止吧".encode(), ["停止"]),
    (b"text\n\nUser: more", ["\n\nUser:"]),
    (b"\n\nUse", ["\n\nUser:"]),
    (b"stop", ["stop"]),
]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("data", "stops"), STOP_CASES)
def test_stop_strings_at_every_token_alignment(data, stops, include):
    """All ways to cut the text into tokens of one to three bytes, by an added vocabulary."""

    class Cut(Bytes):
        def __init__(self, pieces):
            self.pieces = pieces

        def token_bytes(self, token_id: int) -> bytes:
            return self.pieces[token_id]

    wanted = cut_at_first_stop(data.decode(), stops, include)
    for size in (1, 2, 3):
        for shift in range(size):
            bounds = [0, *range(shift or size, len(data), size), len(data)]
            pieces = [data[a:b] for a, b in pairwise(bounds)]
            detokenizer = Detokenizer(Cut(pieces), stop=stops, include_stop=include)
            text = ""
            for number in range(len(pieces)):
                last = number == len(pieces) - 1
                delta = detokenizer.push([number], finish_reason=FinishReason.LENGTH if last else None)
                text += delta.text
                assert wanted.startswith(text), "text beyond the stop string has left"
                if delta.finish_reason:
                    break
            assert text == wanted
            stopped = wanted != data.decode() or any(data.decode().endswith(stop) for stop in stops)
            assert (delta.finish_reason is FinishReason.STOP) == stopped


@given(
    st.lists(st.sampled_from([ord("a"), ord("b"), ord("c"), 256, 257, 260, 261, 263]), min_size=1, max_size=12),
    st.lists(st.text("abc\n", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.lists(st.integers(1, 3)),
)
def test_stop_strings_follow_the_definition_for_any_tokens(ids, stops, include, splits):
    wanted = cut_at_first_stop(decode_all(ids), stops, include)
    deltas = stream(ids, splits + [1] * len(ids), stop=stops, include_stop=include)
    assert text_of(deltas) == wanted
    kept = [i for delta in deltas for i in delta.token_ids]
    assert kept == ids[: len(kept)]
    # The tokens up to the completing one, and none after it.
    assert len(decode_all(kept)) >= len(wanted)
    if len(kept) < len(ids):
        assert cut_at_first_stop(decode_all(kept[:-1]), stops, include) == decode_all(kept[:-1])


def test_only_what_may_become_a_stop_string_is_held_back():
    deltas = stream(list(b"ab\nc\n\nUx"), stop=["\n\nUser:"])
    assert [delta.text for delta in deltas] == ["a", "b", "", "\nc", "", "", "", "\n\nUx"]
    detokenizer = Detokenizer(Bytes(), stop=["abcd"])
    emitted = longest = 0
    for count, byte in enumerate(b"abcabcabc", 1):
        emitted += len(detokenizer.push([byte]).text)
        longest = max(longest, count - emitted)
    assert longest == 3, "at most len - 1 characters wait"


def test_a_matched_stop_string_reports_itself_and_drops_later_tokens():
    detokenizer = Detokenizer(Bytes(), stop=["b"])
    delta = detokenizer.push(list(b"abc"), [TokenLogprob(i, -1.0) for i in b"abc"])
    assert (delta.text, delta.token_ids, delta.finish_reason, delta.stop) == ("a", [97, 98], FinishReason.STOP, "b")
    assert [entry.token_id for entry in delta.logprobs] == [97, 98]
    assert detokenizer.num_tokens == 2
    with pytest.raises(RuntimeError, match="after the end"):
        detokenizer.push([100])


def test_min_tokens_postpones_stop_strings():
    deltas = stream(list(b"abcabc"), stop=["bc"], min_tokens=4)
    assert text_of(deltas) == "abca"
    assert text_of(stream(list(b"abcabc"), stop=["bc"], min_tokens=3)) == "a"
    # What was completed too early does not count later, even if it is still held back.
    assert text_of(stream(list(b"abx"), stop=["ab", "abab"], min_tokens=3)) == "abx"


def test_the_text_of_an_ending_token_is_hidden_unless_asked_for():
    for include, special_shown, wanted in ((False, False, "a"), (True, False, "a."), (False, True, "a")):
        detokenizer = Detokenizer(Bytes(), include_stop=include, skip_special=not special_shown)
        delta = detokenizer.push([ord("a"), ord(".")], None, FinishReason.STOP, stop_token_id=ord("."))
        assert (delta.text, delta.token_ids, delta.stop) == (wanted, [ord("a"), ord(".")], ord("."))


def test_special_tokens_are_hidden_or_shown():
    assert text_of(stream([ord("a"), 1001, ord("b")])) == "ab"
    assert text_of(stream([ord("a"), 1001, ord("b")], skip_special=False)) == "a<|x|>b"


def test_logprobs_stay_beside_their_tokens_when_merged():
    deltas = stream([ord("a"), *"中".encode(), ord("b"), 1001, ord("c")], logprobs=True, stop=["cd"])
    whole = Delta()
    for delta in deltas:
        assert len(delta.token_ids) == len(delta.logprobs) == len(delta.text_offsets)
        whole.merge(delta)
    assert whole.text == "a中bc"
    assert [entry.token_id for entry in whole.logprobs] == whole.token_ids
    assert whole.finish_reason is FinishReason.LENGTH


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(Bytes(), stop=["a", ""])
