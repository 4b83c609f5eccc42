"""Texts as rows of tokens: some to calibrate on, and others, held out, to measure with."""

from __future__ import annotations

from pathlib import Path

from engine.text.tokenizer import Tokenizer

# Of the file's rows, one in so many is held out.
_HELD_OUT_EVERY = 8


def bundled_text() -> str:
    """The text that calibrates where none is given: this project's own handbook."""
    return (Path(__file__).parent / "calibration.txt").read_text(encoding="utf-8")


def token_rows(text: str, tokenizer: Tokenizer, length: int, most: int) -> tuple[list[list[int]], list[list[int]]]:
    """At most `most` rows of `length` tokens to calibrate on, and those held out between them.

    Every row begins as the model wants a text to begin. Raises ValueError for a text too short for one row of each.
    """
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    token_ids = tokenizer.encode(text, add_special=False, parse_special=False)
    step = length - len(start)
    rows = [[*start, *token_ids[at : at + step]] for at in range(0, len(token_ids) - step + 1, step)]
    held_out = rows[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    calibration = [row for number, row in enumerate(rows, 1) if number % _HELD_OUT_EVERY]
    if not held_out:
        raise ValueError(
            f"the calibration text has {len(token_ids):,} tokens: {_HELD_OUT_EVERY} rows of {length} are the least"
        )
    return calibration[:most], held_out[: max(1, most // 4)]
