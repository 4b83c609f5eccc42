"""Types of command-line arguments: numbers within bounds, with messages that name them."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def integer(low: int, high: int | None = None) -> type[int]:
    """An argparse type: an integer within bounds, with a message that names them."""

    def parse(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            limits = f"at least {low}" if high is None else f"{low} to {high}"
            raise argparse.ArgumentTypeError(f"must be {limits}, not {value}")
        return value

    parse.__name__ = "integer"  # what argparse calls it when `int` fails
    return parse  # type: ignore[return-value]


def number(low: float, high: float) -> Callable[[str], float]:
    """An argparse type: a number within bounds."""

    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {low} to {high}, not {text}")
        return value

    return parse
