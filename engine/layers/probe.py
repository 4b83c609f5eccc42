"""Asks, once per process, whether torch's private CPU kernels exist here and compute what they should.

They may vanish or change between torch versions and are built for some processors only. A kernel that raises or that
differs from plain torch is not used, and the log says so.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence

import torch

logger = logging.getLogger(__name__)

_ROWS, _OUT, _IN = 3, 32, 64


@functools.cache
def prepacked_works(dtype: torch.dtype) -> bool:
    """Whether oneDNN's prepacked linear serves `dtype` (float32 or bfloat16)."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        logger.info("this processor has no bfloat16 products: using plain torch, which is slower")
        return False

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return y

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, _IN, generator=generator).to(dtype)
    weight = torch.randn(_OUT, _IN, generator=generator).to(dtype)
    try:
        return _close("oneDNN prepacked linear", run(x, weight), x.float() @ weight.float().T)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return _refused("oneDNN prepacked linear", error)


@functools.cache
def bfloat16_gain() -> float:
    """How many times faster oneDNN multiplies a prompt's worth of rows in bfloat16 than in float32, here and now.

    The instruction's presence does not tell: on some processors it runs at a fraction of float32's rate. Takes a few
    hundredths of a second; 0 where bfloat16 is emulated or does not work.
    """
    supported = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if not supported or not prepacked_works(torch.bfloat16) or not prepacked_works(torch.float32):
        return 0.0
    calls = []
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(1024, 512, dtype=dtype), 128)
        x = torch.ones(128, 512, dtype=dtype)
        calls.append(functools.partial(torch.ops.mkldnn._linear_pointwise, x, weight, None, "none", [], ""))
    float32, bfloat16 = best_seconds(calls)
    return float32 / bfloat16


def best_seconds(calls: Sequence[Callable[[], object]]) -> list[float]:
    """The shortest time that each of `calls` takes. In turn, and the best of each: another program that takes the core
    for a moment must not decide."""
    best = [float("inf")] * len(calls)
    for _ in range(8):
        for index, call in enumerate(calls):
            started = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - started)
    return best


@functools.cache
def int4pack_works(dtype: torch.dtype) -> bool:
    """Whether torch's packed four-bit product serves activations of `dtype`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, _IN, generator=generator).to(dtype)
    values = torch.randint(0, 16, (_OUT, _IN), generator=generator, dtype=torch.int32)
    scales = torch.rand(_IN // 32, _OUT, 2, generator=generator).to(dtype)
    step, zero = scales.float().permute(1, 0, 2).repeat_interleave(32, dim=1).unbind(-1)
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 32, scales)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return _refused("packed int4 linear", error)
    return _close("packed int4 linear", y, x.float() @ ((values - 8) * step + zero).T)


def _close(what: str, got: torch.Tensor, want: torch.Tensor) -> bool:
    tolerance = 1e-5 if got.dtype == torch.float32 else 1e-2
    error = float((got.float() - want).abs().max() / want.abs().max())
    if error <= tolerance:
        return True
    logger.warning("%s is wrong on this machine (relative error %.1e): not used", what, error)
    return False


def _refused(what: str, error: Exception) -> bool:
    logger.warning("%s is not available (%s): not used", what, str(error).splitlines()[0])
    return False
