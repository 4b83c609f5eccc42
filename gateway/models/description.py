"""What models say of themselves: family, size, quantisation, context. The engine's code reads them, as a process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gateway.models.errors import ModelError


class Description(msgspec.Struct, frozen=True):
    """One model, as `python -m engine.describe` tells it. Sizes in bytes, `context` in tokens."""

    path: str
    name: str
    format: str
    family: str
    parameters: int
    quantization: str
    weights_bytes: int
    context: int
    vocabulary: int
    licence: str | None
    has_chat_template: bool
    end_tokens: list[str]
    recommended_sampling: dict[str, float]


class _Failed(msgspec.Struct, frozen=True):
    path: str
    error: str


def describe(paths: Sequence[Path]) -> dict[Path, Description | str]:
    """Each path's description, or why there is none.

    Raises:
        ModelError: the engine is not installed here, or failed.
    """
    if not paths:
        return {}
    command = [sys.executable, "-m", "engine.describe", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    lines = done.stdout.splitlines()
    if len(lines) != len(paths):
        why = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise ModelError(f"models cannot be read without the engine (`pip install 'tierline[engine]'`): {why}")
    return dict(zip(paths, map(_read, lines), strict=True))


def _read(line: str) -> Description | str:
    try:
        return msgspec.json.decode(line, type=Description)
    except msgspec.ValidationError:
        return msgspec.json.decode(line, type=_Failed).error
