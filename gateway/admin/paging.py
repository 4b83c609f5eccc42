"""Lists in pages: at most `limit` items, and a cursor that leads to the next ones.

A cursor names the last item that was seen, not a number of items, so nothing is skipped or shown twice when items come
or go between two pages.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Annotated, Generic, TypeVar

import msgspec

from gateway.dialects.errors import BadRequest

_Item = TypeVar("_Item")

Limit = Annotated[int, msgspec.Meta(ge=1, le=1000)]


class Paged(msgspec.Struct, frozen=True, kw_only=True):
    """The query of every list. `limit`: items per page; `cursor`: `next_cursor` of the page before."""

    limit: Limit = 100
    cursor: str | None = None

    def after(self) -> str | None:
        """What the last item of the page before was called.

        Raises:
            BadRequest: this is no cursor of this API.
        """
        if self.cursor is None:
            return None
        try:
            return base64.b64decode(self.cursor.encode(), altchars=b"-_", validate=True).decode()
        except (binascii.Error, UnicodeError):
            raise BadRequest("This cursor is none: take 'next_cursor' as it came.", param="cursor") from None


class Page(msgspec.Struct, Generic[_Item], frozen=True):
    """Part of a list. `next_cursor` is None on the last page."""

    data: list[_Item]
    next_cursor: str | None


def page(found: Sequence[_Item], limit: int, name: Callable[[_Item], str]) -> Page[_Item]:
    """The first `limit` of what was found, which is one item more where there are further pages."""
    data = list(found[:limit])
    more = len(found) > limit
    return Page(data, base64.urlsafe_b64encode(name(data[-1]).encode()).decode() if more else None)
