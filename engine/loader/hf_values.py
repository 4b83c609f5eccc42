"""Values of a config.json, or a file like it, by their keys and of the type that is asked; null counts as left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from engine.loader.errors import ModelFileError

_AGAIN = "Download config.json again"
# Sizes are multiplied and turned into floats; what is beyond this is no size of anything.
_MOST = 2**48


class HfValues:
    """A JSON object of the file `path`, with `defaults` for keys left out. Faults are ModelFileErrors."""

    def __init__(
        self, path: Path, content: Mapping[str, Any], defaults: Mapping[str, Any], *, remedy: str = _AGAIN
    ) -> None:
        """`remedy`: what to do about a fault."""
        self.path = path
        self._content = content
        self._defaults = defaults
        self._remedy = remedy

    def fault(self, problem: str, remedy: str | None = None) -> ModelFileError:
        """The error to raise for something in this file."""
        return ModelFileError(self.path, problem, self._remedy if remedy is None else remedy)

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __contains__(self, key: str) -> bool:
        return self._get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; the family's default comes before `default`. Raises when there is neither."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
            raise self._wrong(key, value, f"a whole number up to {_MOST}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, as `integer`."""
        value = self._get(key, default)
        if not _is_finite(value):
            raise self._wrong(key, value, "a number")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; false where nothing is said."""
        value = self._get(key, False)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def list(self, key: str) -> list[Any] | None:
        """A list, or None where there is none."""
        value = self._get(key)
        if value is not None and not isinstance(value, list):
            raise self._wrong(key, value, "a list")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        found = self.list(key)
        if found is None:
            raise self.fault(f"{key!r} is missing")
        if not all(_is_finite(value) for value in found):
            raise self._wrong(key, found, "a list of numbers")
        return tuple(float(value) for value in found)

    def part(self, key: str) -> HfValues | None:
        """The object below `key`, or None where there is none."""
        value = self._get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return HfValues(self.path, value, {}, remedy=self._remedy)

    def _get(self, key: str, default: Any = None) -> Any:
        value = self._content.get(key)
        if value is None:
            value = self._defaults.get(key)
        return default if value is None else value

    def _wrong(self, key: str, value: object, wanted: str) -> ModelFileError:
        return self.fault(f"{key!r} is missing" if value is None else f"{key!r} is {value!r:.80}, not {wanted}")


def _is_finite(value: object) -> TypeGuard[int | float]:
    """Whether it is a number that a float can hold."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
