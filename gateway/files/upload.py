"""A form with a file (multipart/form-data, RFC 7578), taken as it comes: the file goes on to where it is written, piece
by piece, and is never in memory as a whole. Fields are small and few.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.dialects.errors import BadRequest, TooLarge

MAX_FIELDS: Final = 16
MAX_FIELD_BYTES: Final = 4096
MAX_FILENAME: Final = 255
# Of one header of a part: the names of its field and file, or its type.
MAX_HEADER_BYTES: Final = 4096
# What surrounds a file in its form.
FRAMING_BYTES: Final = 64 * 1024

Write = Callable[[bytes], Awaitable[None]]


class Form:
    """The fields of a form, and the name of its file; the file itself went to `write`."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None


async def read_form(content_type: str | None, pieces: AsyncIterator[bytes], write: Write, most_bytes: int) -> Form:
    """Read a form with one file in its field `file`.

    Raises:
        BadRequest: it is no such form.
        TooLarge: the file has more than `most_bytes`.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise BadRequest(
            "Send the file as multipart/form-data, with its boundary in 'content-type': fields 'purpose' and 'file'.",
            code="invalid_form",
        )
    try:
        reader = _Reader(boundary)
        size = 0
        async for piece in pieces:
            for data in reader.feed(piece):
                size += len(data)
                if size > most_bytes:
                    raise TooLarge(f"The file has more than {most_bytes} bytes (batches.max_file_bytes).")
                await write(data)
        reader.end()
    except FormParserError:
        raise BadRequest("The body is no multipart/form-data, or ends too early.", code="invalid_form") from None
    if reader.form.filename is None:
        raise BadRequest(
            "The form has no file; send it in the field 'file'.", code="missing_required_parameter", param="file"
        )
    return reader.form


class _Reader:
    """Takes a form apart. The parser calls back while it is fed; what it says of the file is collected until then."""

    def __init__(self, boundary: bytes) -> None:
        self.form = Form()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_end": self._whole,
            },
            max_header_size=FRAMING_BYTES,  # ours counts before, and says what is too long
        )
        self._pieces: list[bytes] = []
        self._name = self._value = b""
        self._disposition = b""
        self._field: str | None = None  # what the part is: the field of this name, or
        self._is_file = False
        self._text = b""
        self._complete = False

    def feed(self, data: bytes) -> list[bytes]:
        """The bytes of the file in this piece of the form."""
        if self._complete:  # an epilogue, which means nothing
            return []
        self._parser.write(data)
        pieces, self._pieces = self._pieces, []
        return pieces

    def end(self) -> None:
        """Raises FormParserError: that was not all of it."""
        if not self._complete:
            raise FormParserError("the last boundary is missing")

    def _begin(self) -> None:
        self._disposition = self._text = b""
        self._field, self._is_file = None, False

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        if len(self._value) > MAX_HEADER_BYTES:
            what = "The name of the file" if self._name.lower() == b"content-disposition" else "A header of the form"
            raise BadRequest(f"{what} is too long: more than {MAX_HEADER_BYTES} bytes.", code="invalid_form")

    def _header_end(self) -> None:
        name = self._name.lower()
        if name == b"content-disposition":
            self._disposition = self._value
        elif name == b"content-transfer-encoding" and self._value.lower() not in (b"binary", b"8bit", b"7bit"):
            raise BadRequest("A part of the form is encoded; send it as it is.", code="invalid_form")
        self._name = self._value = b""

    def _headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        name, filename = options.get(b"name"), options.get(b"filename")
        if name is None:
            raise BadRequest("A part of the form has no name.", code="invalid_form")
        field = name.decode("utf-8", "replace")
        if field == "file":
            if self.form.filename is not None:
                raise BadRequest("The form has two files; send one.", code="invalid_form", param="file")
            self.form.filename, self._is_file = _safe_name(filename), True
        elif filename is not None:
            raise BadRequest(
                f"'{field[:80]}' is a file; send it as 'file'.", code="unknown_parameter", param=field[:80]
            )
        else:
            if field in self.form.fields or len(self.form.fields) >= MAX_FIELDS:
                raise BadRequest(f"The form has too many fields, or '{field[:80]}' twice.", code="invalid_form")
            self._field = field

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._pieces.append(data[start:end])
            return
        if self._field is None:
            raise BadRequest("A part of the form has no name.", code="invalid_form")
        self._text += data[start:end]
        if len(self._text) > MAX_FIELD_BYTES:
            raise BadRequest(f"The field '{self._field[:80]}' is too long.", code="invalid_form")

    def _end(self) -> None:
        if self._field is not None:
            try:
                self.form.fields[self._field] = self._text.decode()
            except UnicodeDecodeError:
                raise BadRequest(f"The field '{self._field[:80]}' is not UTF-8.", code="invalid_form") from None

    def _whole(self) -> None:
        self._complete = True


def _safe_name(given: bytes | None) -> str:
    """A file's name as it can be shown: without folders, and of bounded length."""
    name = (given or b"").decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
    name = "".join(character for character in name if character.isprintable())
    return name[:MAX_FILENAME] or "file"
