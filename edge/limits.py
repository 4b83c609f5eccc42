"""How much and how long a client may take, and what it is told when that is exceeded.

Times are set by the platform engineer; sizes are fixed, because no honest client comes near them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import uuid_utils
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256
# Requests of one connection that wait for the answer to the one before: no more is read while there are so many.
MAX_PIPELINED = 100
# Chunk sizes, chunk extensions and trailers of a chunked body: one-byte chunks cost 5 bytes per byte of body.
MAX_FRAMING_BYTES = 64 * 1024
MAX_FRAMING_PER_BODY_BYTE = 8
# What a client must send or read on average, once its time-out has passed.
MIN_BYTES_PER_SECOND = 8 * 1024
# A client that still sends when its answer ends the connection is read on, and what it sends is thrown away: closing
# at once would reset it, and the answer be lost. Until it pauses for so long, or has sent so much since then.
LINGER_S = 5.0
MAX_UNWANTED_BYTES = 64 * 1024 * 1024

# The key in an ASGI scope that says: the body did not come in time, answer with status 408.
READ_TIMEOUT = "tierline.read_timeout"


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds.

    read_timeout_s: for a request's head, and for a pause in its body. body_timeout_s: beyond that for a whole body,
    however large. write_timeout_s: for a client that reads
    nothing. keep_alive_s: between two requests. stream_keep_alive_s: the longest silence of a stream that has a sign of
    life to send; 0 sends none. shutdown_delay_s: still serving, but not ready, once asked to stop.
    drain_s: for running requests, after that.
    """

    read_timeout_s: float = 30.0
    body_timeout_s: float = 300.0
    write_timeout_s: float = 60.0
    keep_alive_s: float = 75.0
    stream_keep_alive_s: float = 15.0
    shutdown_delay_s: float = 0.0
    drain_s: float = 20.0

    @property
    def sweep_interval_s(self) -> float:
        """How late a limit may be noticed: a second, less where the limits themselves are short."""
        return min(1.0, self.read_timeout_s / 4, self.write_timeout_s / 4, (self.stream_keep_alive_s or 4.0) / 4)

    @property
    def silence_s(self) -> float:
        """The silence, as sweeps see it, after which a stream sends its sign of life.

        The sweep that finds a stream silent comes up to an interval after its last piece, and the one that acts up to
        an interval late.
        """
        return self.stream_keep_alive_s - 2 * self.sweep_interval_s if self.stream_keep_alive_s else float("inf")


class Refused(Exception):
    """A request that is answered here, because no application could make sense of it. Ends the connection."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.request_id = f"req-{uuid_utils.uuid7()}"

    def answer(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """The whole answer: those headers, and OpenAI's error object with the request id."""
        error = {
            "message": str(self),
            "type": "invalid_request_error",
            "param": None,
            "code": self.code,
            "request_id": self.request_id,
        }
        body = json.dumps({"error": error}).encode()
        headers = [
            *headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self.request_id.encode()),
            (b"connection", b"close"),
        ]
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        return STATUS_LINE[self.status] + lines + b"\r\n" + body


def malformed(message: str) -> Refused:
    return Refused(400, "malformed_request", message)


def unknown_coding() -> Refused:
    return Refused(
        501, "unknown_transfer_encoding", "This server knows no 'transfer-encoding' but 'chunked'; send the body plain."
    )


def head_too_large() -> Refused:
    return Refused(
        431,
        "request_head_too_large",
        f"The request line and headers are larger than {MAX_HEAD_BYTES} bytes or more than {MAX_HEADERS} headers.",
    )


def framing_too_large() -> Refused:
    return Refused(
        431, "request_head_too_large", "The chunk extensions and trailers of the body are out of proportion to it."
    )


def read_timed_out() -> Refused:
    return Refused(408, "request_timeout", "The request did not arrive in time. Send it again, without pauses.")
