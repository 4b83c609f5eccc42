"""Settings in messages by the names that the command line has for them."""

from __future__ import annotations

import re

from engine.config import EngineConfig

_SETTINGS = tuple(name for name in EngineConfig.__struct_fields__ if "_" in name)
# Settings of one word are also plain words; only before a value do they mean the setting.
_WORDS = r"precision(?= (?:auto|float32|bfloat16)\b)|device(?= (?:'|cpu\b|cuda\b))"
_NAMED = re.compile(rf"(?<![\w.'/-])(?:{'|'.join(_SETTINGS)}|{_WORDS})\b(?!['\w])")


def with_flags(message: str) -> str:
    """`message` with `max_num_seqs` as `--max-num-seqs`, and so on, for whoever has just written a command line."""
    return _NAMED.sub(lambda found: "--" + found[0].replace("_", "-"), message)
