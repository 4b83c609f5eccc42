"""What making or rotating a key gives: the key, and the token that is shown this once."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Shown(Protocol):
    """What is known of a key without its secret."""

    @property
    def prefix(self) -> str: ...


Info = TypeVar("Info", bound=Shown)


class Created(Generic[Info]):
    """A key with a new token, which is nowhere else; it does not print."""

    __slots__ = ("info", "token")

    def __init__(self, token: str, info: Info) -> None:
        self.token = token
        self.info = info

    def __repr__(self) -> str:
        return f"Created({self.info.prefix}…)"
