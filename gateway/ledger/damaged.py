"""Damaged segments of the journal, kept beside it for whoever wants to look: the journal itself deletes a segment as
soon as everything readable in it is stored.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

logger = logging.getLogger("tierline.ledger")

_SUFFIX: Final = ".damaged"
_KEPT: Final = 3  # the newest; more would fill a disk that keeps lying


def keep_aside(segment: Path) -> Path:
    """Keep a segment under a second name, which takes no space of its own until the first is deleted, and forget the
    oldest of many. Where the file system has no second names, only the segment itself is there.

    Returns:
        Where it can be looked at.
    """
    aside = segment.with_name(segment.name + _SUFFIX)
    try:
        if aside.exists():
            if aside.samefile(segment):
                return aside  # found before, and not stored yet
            aside.unlink()  # of a journal that lay here once
        os.link(segment, aside)
    except OSError as error:
        logger.warning("the damaged segment %s cannot be kept: %s", segment, error)
        return segment
    for old in sorted(segment.parent.glob(f"*{_SUFFIX}"))[:-_KEPT]:
        old.unlink(missing_ok=True)
    return aside
