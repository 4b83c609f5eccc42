"""Server-sent events, parsed as they arrive: bytes in, whole events out, the bytes of each kept for relaying.

It promises the same events however the bytes are cut (in a character, between CR and LF, in the byte order mark), as
the HTML standard defines them (section 9.2.6, "Interpreting an event stream"), with two differences for the sake of
model servers: the last event counts even if its blank line is missing (it is added), and an event without data, such
as a comment that keeps the connection alive, is dropped. The usual `data: {...}` in one piece costs no buffering.
"""

from __future__ import annotations

import re

MAX_EVENT_BYTES = 16 * 1024 * 1024

_BOM = b"\xef\xbb\xbf"
# A line ends with LF, CR LF or CR. A CR at the very end of what has arrived may be half of a CR LF: not an end yet.
_LINE_END = re.compile(rb"\r?\n|\r(?=.)", re.DOTALL)

# raw bytes with the blank line, payload of the data lines, event name (empty if none)
Parsed = tuple[bytes, bytes, bytes]


class EventTooLarge(ValueError):
    """One event is larger than the parser may buffer."""


class SseParser:
    """Feed it pieces of a body with `feed`, then call `close` at the end."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._buffer = bytearray()
        self._line_start = 0  # in the buffer; lines before it belong to the event that is being read
        self._scanned = 0  # no line ends before here and after the line's start
        self._at_start = True  # of the stream, where a byte order mark may stand

    def feed(self, piece: bytes) -> list[Parsed]:
        """Take a piece of the body, return the events that it completes.

        Raises:
            EventTooLarge: what has arrived of the current event exceeds the bound.
        """
        if not self._buffer and piece.startswith(b"data: ") and b"\r" not in piece:
            end = len(piece) - 2
            if piece.find(b"\n") == end and piece.endswith(b"\n\n"):
                self._at_start = False
                return [(piece, piece[6:end], b"")]
        self._buffer += piece
        return self._scan()

    def close(self) -> list[Parsed]:
        """The body has ended: the last event counts if it has data and only its blank line is missing."""
        if not self._buffer:
            return []
        events = []
        if self._buffer.endswith(b"\r"):  # no LF can follow any more
            self._buffer += b"\n"
            events = self._scan()
            if events and not self._buffer:
                raw, data, name = events[-1]
                return [*events[:-1], (raw[:-1], data, name)]
        raw = bytes(self._buffer)
        raw += b"\n" if raw.endswith((b"\n", b"\r")) else b"\n\n"
        self._buffer.clear()
        parsed = self._parse(raw)
        return [*events, parsed] if parsed else events

    def _scan(self) -> list[Parsed]:
        events: list[Parsed] = []
        buffer, start = self._buffer, 0
        while found := _LINE_END.search(buffer, self._scanned):
            blank = found.start() == self._line_start
            self._line_start = self._scanned = found.end()
            if blank:
                parsed = self._parse(bytes(buffer[start : self._line_start]))
                start = self._line_start
                if parsed:
                    events.append(parsed)
        if start:
            del buffer[:start]
            self._line_start -= start
        self._scanned = max(self._line_start, len(buffer) - 1)  # the last byte may be the CR of a CR LF
        if len(buffer) > self._max_event_bytes:
            raise EventTooLarge(f"an event of the stream is larger than {self._max_event_bytes} bytes")
        return events

    def _parse(self, raw: bytes) -> Parsed | None:
        """Read the fields of one event; None if it has no data."""
        if self._at_start:
            self._at_start = False
            raw = raw.removeprefix(_BOM)  # it says nothing, and to many clients it is part of the field's name
        data: list[bytes] = []
        name = b""
        for line in raw.splitlines():  # bytes split at LF, CR and CR LF only
            field, _, value = line.partition(b":")
            if field == b"data":
                data.append(value.removeprefix(b" "))
            elif field == b"event":
                name = value.removeprefix(b" ")
        return (raw, b"\n".join(data), name) if data else None
