"""What would make the host wait for a GPU, refused on any machine: for tests of the path of a step.

torch knows such a mode for CUDA alone. Here calls are looked at by their names and arguments, as they are made: reading
a value, copying to or from a device, and results whose size the device decides. The three ways that wait for nothing
(`Staging.send`, `upload`, `Download`) are let through, and what the interpreter does inside a kernel is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels.launch import Launch
from engine.layers.staging import Download, Staging

_READS = {"item", "tolist", "numpy", "cpu", "cuda", "__bool__", "__int__", "__float__", "__index__", "__array__"}
_SIZED_BY_VALUES = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "repeat_interleave"}
_FACTORIES = {"tensor", "as_tensor", "scalar_tensor"}
_aten = torch.ops.aten
_WAITING_OPERATIONS = {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default}


class WaitsForDevice(AssertionError):
    """The host would wait."""


class _Calls(TorchFunctionMode):  # type: ignore[misc]
    """Looks at calls as they are written."""

    def __init__(self, paused: list[bool]) -> None:
        super().__init__()
        self._paused = paused

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if not self._paused[-1] and (why := _why(getattr(func, "__name__", ""), args, keywords)):
            raise WaitsForDevice(why)
        return func(*args, **keywords)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at what calls come down to."""

    def __init__(self, paused: list[bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._paused = paused

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._paused[-1] and func in _WAITING_OPERATIONS:
            raise WaitsForDevice(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def _why(name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> str | None:
    values = (*args, *keywords.values())
    if name in _READS:
        return f"{name} reads a value"
    if name in _SIZED_BY_VALUES:
        return f"{name} has a size that the device decides"
    if name in _FACTORIES and keywords.get("device") is not None:
        return f"torch.{name} copies host values to a device"
    if name == "to" and any(isinstance(value, (torch.device, str)) for value in values):
        return "to copies between devices"
    if name in ("__getitem__", "__setitem__"):
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(index, (list, np.ndarray)) for index in indices):
            return "indices on the host are copied to a device"
        if any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices):
            return "indexing by a mask has a size that the device decides"
    return None


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise WaitsForDevice where the host would wait for a GPU."""
    paused = [False]

    def let_through(function: Callable[..., Any]) -> Callable[..., Any]:
        def through(*arguments: Any, **keywords: Any) -> Any:
            paused.append(True)
            try:
                return function(*arguments, **keywords)
            finally:
                paused.pop()

        return through

    import engine.adapters.low_rank
    import engine.flight
    import engine.runner
    import engine.sampling.grammar
    import engine.sampling.logprobs
    import engine.sampling.on_device
    import engine.sampling.token_counts
    import engine.sampling.truncate

    users = (
        engine.adapters.low_rank,
        engine.flight,
        engine.runner,
        engine.sampling.grammar,
        engine.sampling.logprobs,
        engine.sampling.on_device,
        engine.sampling.token_counts,
        engine.sampling.truncate,
    )
    with ExitStack() as stack:
        for owner, name in ((Launch, "run"), (Staging, "send"), (Staging, "put"), (Download, "__init__")):
            stack.enter_context(patch.object(owner, name, let_through(getattr(owner, name))))
        for user in users:
            stack.enter_context(patch.object(user, "upload", let_through(user.upload)))
        stack.enter_context(_Calls(paused))
        stack.enter_context(_Operations(paused))
        yield
