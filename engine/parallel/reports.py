"""What the other ranks say of themselves to rank 0."""

from __future__ import annotations

import msgspec

# A rank says at least so often that it is there.
ALIVE_SECONDS = 1.0


class Alive(msgspec.Struct, tag=True):
    """This rank's process runs, whatever its main thread waits for."""


class Loaded(msgspec.Struct, tag=True):
    """This rank has its part and does what it is told from now on."""


class Failed(msgspec.Struct, tag=True):
    """This rank cannot go on, and ends."""

    text: str


Report = Alive | Loaded | Failed
