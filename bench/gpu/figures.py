"""One figure of the check: what was reached, what the card would allow, and what we want to reach."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bench.report import Row


@dataclass(frozen=True, slots=True)
class Figure:
    """`bound`: the most (or, of a time, the least) that the measured card allows; `goal`: what we want, as `achieved`.

    A `peer` figure is another program's, or the card's own: there is nothing to want of it.
    """

    what: str
    setting: str
    unit: str
    achieved: float
    bound: float | None = None
    goal: float | None = None
    system: str = "tierline"

    @property
    def share(self) -> float | None:
        """Of the bound."""
        return None if self.bound is None else self.achieved / self.bound

    def rows(self) -> Iterator[Row]:
        """As every benchmark reports: one row per number."""
        numbers = {self.system: self.achieved, "roofline": self.bound, "goal": self.goal}
        for system, value in numbers.items():
            if value is not None:
                yield Row.of(self.what, system, self.setting, self.unit, [value])


def synchronize(device: torch.device) -> None:
    """Wait for the device; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device, *, repeats: int = 10, warm: int = 3) -> float:
    """Mean seconds of `work`, on the clock of the wall, the device waited for at both ends."""
    for _ in range(warm):
        work()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - start) / repeats
