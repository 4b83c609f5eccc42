"""Between host and device without waiting: arrays of a step to fixed addresses, single arrays, and results back.

Recorded device work reads its inputs where they were when it was recorded, so every array has a place of its own that
never moves. A copy from pinned memory runs beside the host; the buffer is filled again only when the copy is over.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16  # bytes: what kernels may assume of a pointer


class Staging:
    """Named arrays, one behind the other in their order of declaration. Not thread-safe: one step at a time."""

    def __init__(self, fields: Mapping[str, tuple[int, torch.dtype]], device: torch.device) -> None:
        """`fields`: most elements and their type, by name. What is put rarely, or large, is best declared last."""
        self._spans: dict[str, tuple[int, int, torch.dtype]] = {}
        total = 0
        for name, (elements, dtype) in fields.items():
            self._spans[name] = total, elements, dtype
            total += -(-elements * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(total, dtype=torch.uint8, pin_memory=on_gpu)
        self._device = torch.zeros(total, dtype=torch.uint8, device=device)
        self._arrays = {name: self._view(self._host, name).numpy() for name in fields}
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._is_filling = False
        self._end = 0

    def _view(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        start, elements, dtype = self._spans[name]
        return buffer[start : start + elements * dtype.itemsize].view(dtype)

    def on_device(self, name: str) -> torch.Tensor:
        """The array's place on the device, all of it; its address never changes."""
        return self._view(self._device, name)

    def put(self, name: str, values: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> None:
        """Note what is to be at the front of an array from the next `send` on.

        Raises ValueError where there is not so much room.
        """
        start, elements, dtype = self._spans[name]
        if values.size > elements:
            raise ValueError(f"a step with {values.size} entries exceeds the {elements} that its buffer was built for")
        if not self._is_filling and self._copied is not None:
            self._copied.synchronize()
        self._is_filling = True
        self._arrays[name][: values.size] = values.reshape(-1)
        self._end = max(self._end, start + values.size * dtype.itemsize)

    def send(self) -> None:
        """Start the copy of what was put; what runs on the stream after it sees it."""
        self._device[: self._end].copy_(self._host[: self._end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._is_filling, self._end = False, 0


def upload(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Host values on the device: the copy is begun, and nobody waits for it. On a CPU they are shared, not copied."""
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)  # the pinned memory stays as it is until it was read


class Download:
    """Tensors on their way to the host: begun when this is made, waited for when they are asked for."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors, self._copied = tensors, None
        if any(tensor.device.type == "cuda" for tensor in tensors):
            self._tensors = tuple(
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            )
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def get(self) -> tuple[torch.Tensor, ...]:
        """The tensors, on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors
