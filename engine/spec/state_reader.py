"""What reads the model's inner states, step by step, to draft from them; the runner shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.types import RowResult, StepRow


class StateReader(Protocol):
    """Who wants to see what enters some of the layers, and has pages under the numbers of the model's."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers, ascending."""
        ...

    def follow(self, rows: Sequence[StepRow], states: torch.Tensor, results: Sequence[RowResult]) -> None:
        """A step has run. states: float32 `[tokens, taps * hidden]`, the rows' tokens laid end to end. Never raises."""
        ...

    def copy_pages(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """The model's pages are copied, before a step; all sources are read before any page is written."""
        ...
