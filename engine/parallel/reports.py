"""What the other ranks say of themselves to rank 0."""

from __future__ import annotations

import msgspec


class Loaded(msgspec.Struct, tag=True):
    """This rank has its part and does what it is told from now on."""


class Failed(msgspec.Struct, tag=True):
    """This rank cannot go on, and ends."""

    text: str


Report = Loaded | Failed
