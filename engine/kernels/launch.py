"""One description of a kernel launch for all its uses: on the GPU, interpreted on a CPU, compiled ahead of time.

A kernel's host function builds a `Launch` from tensors; `run()` executes it. `compile.py` takes the same object, built
from tensors without storage, to compile exactly the specialisation that serving would, so the two cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Contracting `a * b + c` into one instruction: faster and at least as accurate. Said at every launch because Triton's
# own default differs between releases.
FP_FUSION = True


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its grid, its run-time arguments, its compile-time constants and its resources."""

    kernel: Any  # a `triton.jit` function; Triton has no types
    grid: tuple[int, ...]  # programs per axis; one axis at zero: nothing to do
    args: Mapping[str, torch.Tensor | int | float]
    constants: Mapping[str, int | float | bool | str]
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread; None: as many as the assembler likes

    def run(self) -> None:
        """Launch on the current stream (or interpret, under TRITON_INTERPRET=1)."""
        if 0 in self.grid:
            return
        self.kernel[self.grid](
            **self.args,
            **self.constants,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            enable_fp_fusion=FP_FUSION,
            maxnreg=self.max_registers,
        )


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`. Triton's tiles have such sides."""
    return 1 << max(0, n - 1).bit_length()
