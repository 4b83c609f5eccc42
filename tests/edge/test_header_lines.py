"""Headers of an answer as lines: what an application that answers often gives in place of pairs."""

from __future__ import annotations

import pytest

from edge.cycle import checked_lines, header_lines
from gateway.http import headers_of

PAIRS = [(b"content-type", b"text/plain"), (b"x-empty", b""), (b"x-colons", b"a: b: c")]


def test_each_header_is_a_line() -> None:
    assert header_lines(PAIRS) == b"content-type: text/plain\r\nx-empty: \r\nx-colons: a: b: c\r\n"
    assert header_lines([]) == b""


def test_lines_are_read_back() -> None:
    assert headers_of(header_lines(PAIRS)) == PAIRS
    assert headers_of(b"") == []


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n", b"\0", b"\r\nset-cookie: a=b"])
def test_a_header_is_no_more_than_one(end: bytes) -> None:
    with pytest.raises(RuntimeError, match="line break"):
        header_lines([(b"x-name", b"value" + end), (b"x-other", b"1")])
    with pytest.raises(RuntimeError, match="line break"):
        checked_lines(b"x-name: value" + end + b"\r\n", 1)
