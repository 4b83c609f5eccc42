"""The event parser: the standard's rules, and the same events however the bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backends.sse import EventTooLarge, Parsed, SseParser

FRAGMENTS = [
    b"data: ",
    b"data:",
    b"data",
    b"data: {}\n\n",
    b"data: [DONE]\n\n",
    b"event: error",
    b": ping",
    b"id: 1",
    b"\n",
    b"\r",
    b"\r\n",
    b"\n\n",
    b"\xef\xbb\xbf",
    "ä€𝄞".encode(),
    b"x",
    b":",
    b" ",
]


def parse(pieces: list[bytes]) -> list[Parsed]:
    parser = SseParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.close()


def cut(whole: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(whole) + 1) for place in places), len(whole)]
    return [whole[start:end] for start, end in itertools.pairwise(edges)]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=20).map(b"".join), st.lists(st.integers(0, 200), max_size=8))
@example(b"data: a\r\n\r\ndata: b\r\n\r\n", [8, 10])
@example(b"\xef\xbb\xbfdata: a\n\n", [1, 2])
def test_any_cutting_gives_the_same_events(whole, places):
    events = parse([whole])
    assert parse(cut(whole, places)) == events
    assert parse([whole[i : i + 1] for i in range(len(whole))]) == events


@given(st.lists(st.text(alphabet='aä€𝄞 :{}"\x85\u2028', min_size=1), max_size=10))
def test_what_is_written_is_read_back(texts):
    stream = b"".join(b"data: " + text.encode() + b"\n\n" for text in texts)
    # U+0085 and U+2028 end lines elsewhere, not here.
    events = parse([stream])
    assert [data.decode() for _, data, _ in events] == texts
    assert b"".join(raw for raw, _, _ in events) == stream


@pytest.mark.parametrize(
    ("stream", "data"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a\n\n", [b" a"]),  # one space belongs to the field, the rest to the value
        (b"data: a\r\n\r\n", [b"a"]),
        (b"data: a\r\r", [b"a"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data\n\n", [b""]),
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b": ping\n\ndata: a\n\n", [b"a"]),
        (b": ping\ndata: a\n\n", [b"a"]),
        (b"\n\n\ndata: a\n\n\n", [b"a"]),
        (b"id: 7\nretry: 10\n\n", []),
        (b"datax: a\n\n", []),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [b"a"]),  # a mark is one at the start only
        (b"data: a\n\ndata: b", [b"a", b"b"]),
        (b"data: a\n", [b"a"]),
        (b"data: a\n\n: bye", [b"a"]),
        (b"", []),
    ],
)
def test_rules_of_the_standard(stream, data):
    assert [event[1] for event in parse([stream])] == data


def test_event_name_is_kept():
    assert parse([b"event: error\ndata: {}\n\ndata: {}\n\n"]) == [
        (b"event: error\ndata: {}\n\n", b"{}", b"error"),
        (b"data: {}\n\n", b"{}", b""),
    ]


def test_raw_bytes_always_end_an_event():
    for stream in (b"data: a", b"data: a\n", b"data: a\r\n"):
        [(raw, _, _)] = parse([stream])
        assert raw.splitlines()[-1] == b""


def test_usual_event_is_not_copied():
    piece = b'data: {"choices":[]}\n\n'
    [(raw, _, _)] = SseParser().feed(piece)
    assert raw is piece


def test_size_is_bounded():
    parser = SseParser(max_event_bytes=1000)
    assert parser.feed(b"data: " + b"x" * 900) == []
    with pytest.raises(EventTooLarge, match="1000 bytes"):
        parser.feed(b"x" * 200)


def test_many_small_pieces_of_one_event_cost_linear_time():
    """Half a million pieces finish in seconds; searching or copying all again for each would take minutes."""
    parser = SseParser()
    for _ in range(500_000):
        assert not parser.feed(b"0123456789")
    assert parser.feed(b"\n\n") == []  # no field name: no event, but nothing lost track either
    [(_, data, _)] = parser.feed(b"data: a\n\n")
    assert data == b"a"
