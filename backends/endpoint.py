"""A replica's address on the wire: the bytes of a request to it, with everything that does not change made once."""

from __future__ import annotations

import re
from collections.abc import Mapping

from backends.connection import Origin

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NO_HEADER_VALUE = re.compile(r"[^\t\x20-\x7e\xa0-\xff]")
_OUR_HEADERS = frozenset(
    ("host", "content-length", "transfer-encoding", "connection", "content-type", "accept-encoding", "x-request-id")
)


class Endpoint:
    """A replica's address and its fixed headers.

    Raises ValueError for a URL without scheme and host, and for headers that HTTP does not allow or that are ours.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        self.base_url = base_url
        self.origin = Origin(base_url)
        own = {"user-agent": "tierline", **{name.lower(): value for name, value in (headers or {}).items()}}
        for name in own:
            header_name(name)
        self._head = f" HTTP/1.1\r\nhost: {self.origin.authority}\r\naccept-encoding: identity\r\n".encode()
        self._head += _header_lines(own)

    def post(self, path: str, body: bytes, request_id: str, headers: Mapping[str, str]) -> bytes:
        """The bytes of a POST of JSON to `path` below the base URL.

        Raises:
            ValueError: a header that HTTP does not allow.
        """
        changing = b"x-request-id: %b\r\n" % request_id.encode()
        if headers:
            changing += _header_lines(headers)
        head = b"POST %b%b%b%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        return head % (self.origin.path.encode(), path.encode(), self._head, changing, len(body)) + body

    def post_beside(self, path: str, body: bytes, request_id: str) -> bytes:
        """The bytes of a POST of JSON to a page that lies beside `/v1`, not below it."""
        root = self.origin.path.removesuffix("/v1")
        changing = b"x-request-id: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        return b"POST %b%b" % ((root + path).encode(), self._head) + changing % (request_id.encode(), len(body)) + body

    def get(self, path: str) -> bytes:
        """The bytes of a GET of an absolute path on this replica."""
        return b"GET " + path.encode() + self._head + b"\r\n"


def header_name(name: str) -> str:
    """The name of a header that may be configured.

    Raises:
        ValueError: it is no header name, or one that the gateway sets itself.
    """
    if not _HEADER_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a header name")
    if name.lower() in _OUR_HEADERS:
        raise ValueError(f"the header {name!r} is set by the gateway itself and cannot be configured")
    return name


def header_value(value: str) -> str:
    """The value of a header.

    Raises:
        ValueError: it holds control characters, or some that HTTP cannot carry.
    """
    if _NO_HEADER_VALUE.search(value):
        raise ValueError("the value of a header holds no line break, control character or character beyond Latin-1")
    return value


def _header_lines(headers: Mapping[str, str]) -> bytes:
    lines = ""
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a header name")
        try:
            lines += f"{name}: {header_value(value)}\r\n"
        except ValueError as error:
            raise ValueError(f"header {name!r}: {error}") from None
    return lines.encode("latin-1")
