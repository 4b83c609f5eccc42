"""Files of questions with known answers: tab-separated, with a header, plain or gzipped."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from cache.verifier.corpus import Asked

_RowType = TypeVar("_RowType")
_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no")


class InvalidFile(ValueError):
    """The file cannot be used; the message names the file, the line and what is wrong."""


class Pair(msgspec.Struct, frozen=True):
    """Two questions; `same` means that one answer serves both."""

    text_a: str
    text_b: str
    same: bool


def read_pairs(path: Path) -> list[Pair]:
    """Read `text_a, text_b, same`.

    Raises:
        InvalidFile: it cannot be read, a column is missing, or `same` is neither 1 nor 0.
    """

    def convert(row: dict[str, str], where: str) -> Pair:
        same = row["same"].strip().lower()
        if same not in _TRUE + _FALSE:
            raise InvalidFile(f"{where}: 'same' must be 1 or 0, got {row['same']!r}")
        return Pair(row["text_a"], row["text_b"], same in _TRUE)

    return _read(path, ("text_a", "text_b", "same"), convert)


def read_stream(path: Path) -> list[Asked]:
    """Read `text, answer_id`.

    Raises:
        InvalidFile: it cannot be read, or a column is missing.
    """
    return _read(path, ("text", "answer_id"), lambda row, _: Asked(row["text"], row["answer_id"]))


def _read(path: Path, columns: tuple[str, ...], convert: Callable[[dict[str, str], str], _RowType]) -> list[_RowType]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidFile(f"{path} cannot be read: {error}") from error
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
    missing = [name for name in columns if name not in (reader.fieldnames or ())]
    if missing:
        raise InvalidFile(
            f"{path}:1: no column {', '.join(map(repr, missing))}. The first line must name the columns "
            f"{', '.join(columns)}, separated by tabs."
        )
    rows = []
    for row in reader:
        where = f"{path}:{reader.line_num}"
        if any(row[name] is None for name in columns):
            raise InvalidFile(f"{where}: the line has fewer columns than the header")
        rows.append(convert(row, where))
    if not rows:
        raise InvalidFile(f"{path} has no rows")
    return rows
