"""A test double of CUDA graphs for machines without a GPU: records every operation and does it again on replay.

As a graph would, a replay reads and writes the very tensors of the recording, and starts every kernel with the numbers
that it was recorded with: a length that is taken from the host stays the old one, and shows. Work that waits for the
device (`.item()`, `.tolist()`) is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.graphs import Work
from engine.kernels.launch import Launch

_WAITS = {torch.ops.aten._local_scalar_dense.default}


class TapeRecorder:
    """`engine.graphs.Recorder` for tests. `replayed`: the numbers of the recordings that were replayed, in order."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.replayed: list[int] = []

    def record(self, work: Work) -> Work:
        """See `Recorder`. Raises RuntimeError for work that waits for the device."""
        number, steps = self.num_recorded, _record(work)
        self.num_recorded += 1

        def replay() -> None:
            self.replayed.append(number)
            for step in steps:
                step()

        return replay


def _record(work: Work) -> list[Callable[[], None]]:
    steps: list[Callable[[], None]] = []
    tape = _Tape(steps)
    run = Launch.run

    def launched(launch: Launch) -> None:
        steps.append(lambda: run(launch))
        tape.paused = True  # what the interpreter does inside is the kernel's own
        run(launch)
        tape.paused = False

    with patch.object(Launch, "run", launched), tape:
        work()
    return steps


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, steps: list[Callable[[], None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps = steps
        self.paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        result = func(*args, **keywords)
        if self.paused:
            return result
        if func in _WAITS:
            raise RuntimeError("recorded work waits for the device: it reads a value of a tensor")
        outputs = [value for value in _flat(result) if isinstance(value, torch.Tensor)]
        inputs = {_storage(value) for value in _flat((args, keywords)) if isinstance(value, torch.Tensor)}
        fresh = [output for output in outputs if _storage(output) not in inputs]

        def again() -> None:
            renewed = [value for value in _flat(func(*args, **keywords)) if isinstance(value, torch.Tensor)]
            for output, value in zip(outputs, renewed, strict=True):
                if any(output is one for one in fresh):
                    output.copy_(value)

        if fresh or func._schema.is_mutable:  # else it is a view of what is there already
            self._steps.append(again)
        return result


def _storage(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:  # a packed weight, which has no address and is nobody's view
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def _flat(value: Any) -> list[Any]:
    """The leaves of nested lists, tuples and dictionaries."""
    if isinstance(value, dict):
        return [leaf for one in value.values() for leaf in _flat(one)]
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in _flat(one)]
    return [value]
