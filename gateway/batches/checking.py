"""The lines of an input file: what each must be, and what is wrong with those that are not.

A batch is checked as a whole before any of it runs: one wrong line, and nothing was asked or paid. Only the form is
looked at; whether a model takes a request shows when it is asked, and then only that line fails.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from gateway.batches.record import Fault

MAX_CUSTOM_ID: Final = 256
# Faults that a batch names; who has more has one kind of them.
MAX_FAULTS: Final = 100
_raw = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)


class Line(msgspec.Struct, frozen=True):
    """One request of a batch. `number` counts from 1, empty lines too."""

    number: int
    custom_id: str
    body: bytes


class Wrong(Exception):
    """What is wrong with a line."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def read_line(number: int, data: bytes | None, endpoint: str) -> Line | None:
    """A line of the input file; None: it is empty. `data` is None for one that is too long.

    Raises:
        Wrong: it is no request.
    """
    if data is None:
        raise Wrong("line_too_long", "The line is longer than a request body may be (server.max_body_bytes).")
    if number == 1:
        data = data.removeprefix(codecs.BOM_UTF8)  # which some editors put there
    if not data.strip():
        return None
    try:
        given = _raw.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Wrong("invalid_json_line", "The line is not a JSON object.") from None
    unknown = given.keys() - {"custom_id", "method", "url", "body"}
    if unknown:
        name = min(unknown)[:80]
        raise Wrong("unknown_parameter", f"Unknown field '{name}'; a line has custom_id, method, url, body.", name)
    for name in ("custom_id", "method", "url", "body"):
        if name not in given:
            raise Wrong("missing_required_parameter", f"The line has no '{name}'.", name)
    custom_id, method, url = (_string(given, name) for name in ("custom_id", "method", "url"))
    if not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        raise Wrong("invalid_custom_id", f"'custom_id' must have 1 to {MAX_CUSTOM_ID} characters.", "custom_id")
    if method != "POST":
        raise Wrong("invalid_method", f"'method' must be POST, not '{method[:20]}'.", "method")
    if url != endpoint:
        text = f"'url' must be the batch's endpoint {endpoint}, not '{url[:100]}'."
        raise Wrong("mismatched_endpoint", text, "url")
    body = bytes(given["body"])
    try:
        fields = _raw.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Wrong("invalid_body", "'body' must be a JSON object.", "body") from None
    if (streams := fields.get("stream")) is not None and bytes(streams) not in (b"false", b"null"):
        raise Wrong("unsupported_parameter", "'stream' has no meaning in a batch; leave it out.", "body.stream")
    return Line(number, custom_id, body)


class Checked(msgspec.Struct):
    """What a whole file came to."""

    total: int = 0
    faults: list[Fault] = []


async def check(lines: AsyncIterator[bytes | None], endpoint: str, most: int) -> Checked:
    """Look at every line: its form, that its `custom_id` is the only one, that they are not too many."""
    found, seen = Checked(), set[str]()
    number = 0
    async for data in lines:
        number += 1
        if len(found.faults) >= MAX_FAULTS:
            return found
        try:
            line = read_line(number, data, endpoint)
        except Wrong as wrong:
            found.faults.append(Fault(wrong.code, wrong.message, number, wrong.param))
            continue
        if line is None:
            continue
        found.total += 1
        if line.custom_id in seen:
            text = f"'custom_id' is '{line.custom_id[:100]}' in an earlier line too."
            found.faults.append(Fault("duplicate_custom_id", text, number, "custom_id"))
        seen.add(line.custom_id)
        if found.total > most:
            text = f"The file has more than {most} requests (batches.max_requests)."
            found.faults.append(Fault("too_many_requests", text, number))
            return found
    if not found.total and not found.faults:
        found.faults.append(Fault("empty_file", "The file has no request in it."))
    return found


def _string(given: dict[str, msgspec.Raw], name: str) -> str:
    try:
        return _text.decode(given[name])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Wrong("invalid_type", f"'{name}' must be a text.", name) from None
