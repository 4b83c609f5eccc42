"""What must not happen: `cost>+10%`, `quality<-1%`, `refused>0`, and whether it does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

# What a threshold may speak of, and what it means.
METRICS: Final[Mapping[str, str]] = {
    "cost": "change of the cost, in per cent",
    "latency": "change of the 95 % quantile of the time to the whole answer, in per cent",
    "ttft": "change of the 95 % quantile of the time to the first token, in per cent",
    "quality": "change of the predicted share of good answers, in percentage points",
    "refused": "change of the share of requests that limits refuse, in percentage points; without %: number",
    "changed": "share of the requests that go elsewhere, in per cent; without %: number",
    "undecided": "share of the requests that cannot be replayed, in per cent; without %: number",
    "hits_lost": "cache hits that become requests, in per cent of all requests; without %: number",
}
_COUNTED: Final = ("refused", "changed", "undecided", "hits_lost")
_FORM: Final = re.compile(r"\s*([a-z_]+)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*(%?)\s*")


class InvalidThreshold(ValueError):
    """No threshold; the message says what one looks like."""


class Threshold(msgspec.Struct, frozen=True):
    """`text` as it was written. `bound` is a share where `percent`, else a number of requests."""

    text: str
    metric: str
    above: bool
    bound: float
    percent: bool

    def exceeded(self, value: float) -> bool:
        return value > self.bound if self.above else value < self.bound


def parse(text: str) -> Threshold:
    """Read a threshold.

    Raises:
        InvalidThreshold: see there.
    """
    found = _FORM.fullmatch(text)
    if found is None or found[1] not in METRICS:
        known = ", ".join(METRICS)
        raise InvalidThreshold(f"'{text}' is no threshold: write one like 'cost>+10%'. What can be bounded: {known}")
    metric, percent = found[1], found[4] == "%"
    if not percent and metric not in _COUNTED:
        raise InvalidThreshold(f"'{text}': the {METRICS[metric]}; write a % behind the number")
    bound = float(found[3]) / (100 if percent else 1)
    return Threshold(text.strip(), metric, found[2] == ">", bound, percent)
