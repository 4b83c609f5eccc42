"""The base of what is wrong with a value that somebody gave: to a command, to the admin API."""

from __future__ import annotations


class InvalidValue(ValueError):
    """The message says what to write instead; `field` is the field that holds the value, where it is one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field
