"""The compiled CPU kernels against plain torch; how they are built is in test_native_build.py."""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from engine.geometry import step_geometry
from engine.layers import native
from engine.layers.attention import AttentionConfig
from engine.layers.attention_cpu import CpuAttention
from engine.layers.linear_native import NativePackedLinear
from engine.layers.ops_cpu import NativeOps
from engine.layers.ops_torch import TorchOps
from engine.models.spec import Activation
from engine.quant.blocks import BlockTensor
from engine.quant.tiles import to_tiles
from tests.engine.models import row

T = GGMLQuantizationType
CPU = torch.device("cpu")
SILU = Activation.SILU
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


_BUILDS: dict[str, tuple[str, ...]] = {
    "this processor": (),
    "without AVX-512": ("-mno-avx512f",),
    "portable": ("-DTIERLINE_PORTABLE", "-mno-avx512f", "-O1"),
}


@pytest.fixture(scope="module", params=_BUILDS)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The kernels as built for this processor, for one with shorter vectors, and for one without integer products."""
    return native.build(_BUILDS[request.param])


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float | None = None) -> None:
    assert got.shape == want.shape
    tolerance = TOLERANCE[got.dtype] if tolerance is None else tolerance
    assert float((got.float() - want.float()).abs().max() / want.float().abs().max()) <= tolerance


def weight(kind: GGMLQuantizationType, rows: int, columns: int, seed: int = 0) -> BlockTensor:
    values = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
    return BlockTensor(quantize(values, kind), kind, (rows, columns))


@DTYPES
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_small_operations(library: ctypes.CDLL, dtype: torch.dtype, rows: int) -> None:
    ours, plain = NativeOps(library), TorchOps()
    x, w = randn(rows, 576, dtype=dtype), randn(576, seed=1)
    close(ours.rms_norm(x, w, 1e-5), plain.rms_norm(x, w, 1e-5))
    for residual_dtype in (torch.float32, dtype):
        residuals = [randn(rows, 576, dtype=residual_dtype, seed=2) for _ in range(2)]
        close(ours.add_rms_norm(x, residuals[0], w, 1e-5), plain.add_rms_norm(x, residuals[1], w, 1e-5))
        assert torch.equal(*residuals)
    gate_up = randn(rows, 2 * 160, dtype=dtype) * 8
    for activation in Activation:
        close(ours.gated(gate_up, activation), plain.gated(gate_up, activation))
    heads = randn(rows, 5, 64, dtype=dtype)[:, 1:4]  # strided, as heads of a fused product
    close(ours.rms_norm(heads, w[:64], 1e-5), plain.rms_norm(heads, w[:64], 1e-5))


@DTYPES
def test_rows_that_lie_apart(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Every operation on views into wider tensors: the kernels count on rows, and heads, side by side."""
    ours, plain, w = NativeOps(library), TorchOps(), randn(64, seed=1)
    x = randn(5, 96, dtype=dtype)[:, 16:80]
    for width in (64, 96):  # the residual's rows side by side, and apart
        residuals = [randn(5, width, seed=2) for _ in range(2)]
        first, second = (residual[:, :64] for residual in residuals)
        close(ours.add_rms_norm(x, first, w, 1e-5), plain.add_rms_norm(x, second, w, 1e-5))
        assert torch.equal(*residuals)
    close(ours.gated(x, SILU), plain.gated(x, SILU))
    table, positions = randn(9, 64, seed=3), torch.tensor([8, 0, 3])
    results = []
    for ops in (ours, plain):
        heads = randn(3, 2, 96, dtype=dtype, seed=4)
        ops.rotary(heads[..., :64], heads[:, :1, :64], table, positions)
        results.append(heads)
    close(results[0], results[1])


@DTYPES
@pytest.mark.parametrize("rotary_dim", [64, 32, 16])
def test_rotary(library: ctypes.CDLL, dtype: torch.dtype, rotary_dim: int) -> None:
    tokens = 7
    angles = randn(50, rotary_dim // 2) * 3
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.tensor([0, 3, 49, 4, 4, 11, 30])
    results = []
    for ops in (NativeOps(library), TorchOps()):
        qkv = randn(tokens, 6 * 64, dtype=dtype)
        q, k = qkv[:, : 3 * 64].view(tokens, 3, 64), qkv[:, 3 * 64 : 5 * 64].view(tokens, 2, 64)
        ops.rotary(q, k, table, positions)
        results.append(qkv)
    close(results[0], results[1])
    assert torch.equal(results[0][:, 5 * 64 :], randn(tokens, 6 * 64, dtype=dtype)[:, 5 * 64 :])


def test_extreme_numbers(library: ctypes.CDLL) -> None:
    ours, plain = NativeOps(library), TorchOps()
    gates = torch.tensor(
        [0.0, -0.0, 88.0, -88.0, 104.0, -104.0, 1e30, -1e30, 3e38, -3e38, 1e-40, 5.0, -5.0, 20.0, -20, 1]
    )
    gate_up = torch.cat([gates, torch.full((16,), 0.5)]).unsqueeze(0)
    assert torch.allclose(ours.gated(gate_up, SILU), plain.gated(gate_up, SILU), rtol=1e-5, atol=1e-30)
    swiglu = Activation.CLAMPED_SWIGLU
    for both in (gate_up, gate_up.roll(16, dims=1)):  # up cut at both signs of its limit, too
        assert torch.allclose(ours.gated(both, swiglu), plain.gated(both, swiglu), rtol=1e-5, atol=1e-30)
        gelu = Activation.GELU_TANH  # torch's loses what is left of gates below -5 to cancellation
        assert torch.allclose(ours.gated(both, gelu), plain.gated(both, gelu), rtol=1e-5, atol=1e-6)
    for poison in (math.nan, math.inf):
        for activation, at in itertools.product(Activation, (3, 19)):
            bad = gate_up.clone()
            bad[0, at] = poison
            got, want = ours.gated(bad, activation), plain.gated(bad, activation)
            assert torch.equal(got.isfinite(), want.isfinite())
        x = randn(2, 32)
        x[1, 5] = poison
        norm = ours.rms_norm(x, torch.ones(32), 1e-5)
        assert norm[0].isfinite().all()
        assert not norm[1].isfinite().all()


def test_bfloat16_rounds_as_torch_does(library: ctypes.CDLL) -> None:
    """Random bit patterns, subnormals, infinities and NaNs included, stored one by one and sixteen at a time."""
    bits = torch.randint(-(1 << 31), 1 << 31, (4096, 16), generator=torch.Generator().manual_seed(0))
    values = bits.to(torch.int32).view(torch.float32)
    values[:8, 0] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 3.3895e38, 3.4028e38])
    tiles = to_tiles(weight(T.Q8_0, 4, 32))
    assert tiles is not None
    # y = 0 + bias, stored as bfloat16: the rounding alone.
    for start in range(0, 4096, 1024):
        for at in (0, 4, 8, 12):
            bias = values[start, at : at + 4].contiguous()
            got = NativePackedLinear(library, tiles, bias)(torch.zeros(1, 32, dtype=torch.bfloat16))[0]
            assert torch.equal(got.nan_to_num(1.0), bias.to(torch.bfloat16).nan_to_num(1.0))
            assert torch.equal(got.isnan(), bias.isnan())
    # The vector form: x cos - y sin with a sine of zero, rounded.
    x = values.to(torch.bfloat16).repeat(1, 4).view(4096, 1, 64)
    cosines = randn(4096, 32) * 3
    table, rotated = torch.cat([cosines, torch.zeros(4096, 32)], dim=-1), x.clone()
    x[~x.isfinite()] = 1.0
    rotated[rotated.isinf()] = 1.0  # times zero it would be NaN, in its partner too
    NativeOps(library).rotary(rotated, x.clone(), table, torch.arange(4096))
    lost = values.to(torch.bfloat16).repeat(1, 4).view(4096, 1, 64).isnan()
    lost |= lost.roll(32, dims=-1)
    assert torch.equal(rotated.isnan(), lost)
    want = (x.float() * cosines.repeat(1, 2).unsqueeze(1)).to(torch.bfloat16)
    assert torch.equal(rotated[~lost], want[~lost])


@DTYPES
@pytest.mark.parametrize("kind", [T.Q4_0, T.Q4_1, T.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 31])
def test_packed_linear(library: ctypes.CDLL, dtype: torch.dtype, kind: GGMLQuantizationType, rows: int) -> None:
    tensor = weight(kind, 53, 160)
    tiles = to_tiles(tensor)
    assert tiles is not None
    bias = randn(53, seed=3)
    x = randn(rows, 160, dtype=dtype)
    x[:, 7] *= 300  # an outlier, as real activations have
    weights = torch.from_numpy(tensor.dequantize())
    want = x.float() @ weights.T + bias
    linear = NativePackedLinear(library, tiles, bias, out_dtype=torch.float32)
    got = linear(x)
    # Weights are exact; an activation is off by at most 1 / 65,024 of the largest in its block of 32.
    largest = x.float().abs().view(rows, 5, 32).amax(dim=-1)
    bound = largest / 65_024 @ weights.abs().view(53, 5, 32).sum(dim=-1).T
    assert ((got - want).abs() <= 1.01 * bound + 1e-6 * want.abs().max()).all()
    assert NativePackedLinear(library, tiles)(x).dtype == dtype
    for size in (1, 3, 8):  # a row's result does not depend on its mates
        assert torch.equal(torch.cat([linear(piece) for piece in x.split(size)]), got)


def test_packed_linear_keeps_faults_in_their_row(library: ctypes.CDLL) -> None:
    tiles = to_tiles(weight(T.Q4_1, 8, 64))
    assert tiles is not None
    x = randn(3, 64)
    x[1, 40] = math.nan
    x[2] = 0
    y = NativePackedLinear(library, tiles)(x)
    assert y[0].isfinite().all()
    assert y[1].isnan().all()
    assert not y[2].any()


@DTYPES
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 48])
def test_paged_attention(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, group: int, head_dim: int
) -> None:
    """Rows around page and chunk borders, pages shuffled and everything else poisoned, against gathering torch."""
    monkeypatch.setattr(native, "library", lambda: library)
    kv_heads, lengths, new = 2, [1, 15, 16, 17, 127, 128, 129, 700, 300], {700: 3, 300: 41}
    config = AttentionConfig(
        num_layers=1,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        num_blocks=140,
        block_size=16,
        dtype=dtype,
        device=CPU,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_blocks_per_seq=64,
    )
    pages = iter((np.random.default_rng(0).permutation(139) + 1).tolist())
    tables = [[next(pages) for _ in range(-(-length // 16))] for length in lengths]
    # The last rows compute pieces of prompts: one so short that it is served token by token, one longer.
    rows = [
        row([0] * length, table, start=length - new.get(length, 1))
        for length, table in zip(lengths, tables, strict=True)
    ]
    step = step_geometry(rows, 16, 1024)
    tokens = step.num_tokens
    qkv = randn(tokens, (group + 2) * kv_heads, head_dim, dtype=dtype, seed=5)
    q, k, v = qkv.split([group * kv_heads, kv_heads, kv_heads], dim=1)
    past = randn(2, 140, 16, kv_heads, head_dim, dtype=dtype, seed=6)
    results = []
    for use_native in (True, False):
        backend = CpuAttention(config, use_native=use_native)
        backend.kv_cache.fill_(torch.nan)
        for length, table in zip(lengths, tables, strict=True):
            for position in range(length):
                page, slot = table[position // 16], position % 16
                backend.kv_cache[0, :, page, slot] = past[:, page, slot]
        backend.begin(step)
        results.append((backend.forward(0, q, k, v), backend.kv_cache.nan_to_num(7.0)))
    assert results[0][0].isfinite().all()
    close(results[0][0], results[1][0], 1e-5 if dtype == torch.float32 else 1e-2)
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("window", [0, 100])
def test_a_prompt_may_be_cut_anywhere(monkeypatch: pytest.MonkeyPatch, library: ctypes.CDLL, window: int) -> None:
    """The same bits for every token, whichever tokens are computed together with it."""
    monkeypatch.setattr(native, "library", lambda: library)
    config = AttentionConfig(
        num_layers=1,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        scale=0.125,
        num_blocks=30,
        block_size=16,
        dtype=torch.float32,
        device=CPU,
        max_num_seqs=1,
        max_num_batched_tokens=512,
        max_blocks_per_seq=30,
        windows=(window,),
    )
    q, k, v = randn(400, 10, 64, seed=5).split([6, 2, 2], dim=1)
    sinks = randn(6, seed=7)
    results = []
    for sizes in ([400], [1, 4, 5, 16, 102, 1, 17, 130, 124], [300] + [1] * 100):
        backend, done, parts = CpuAttention(config), 0, []
        for size in sizes:
            backend.begin(step_geometry([row([0] * (done + size), range(1, 27), start=done)], 16, 512))
            part = slice(done, done := done + size)
            parts.append(backend.forward(0, q[part], k[part], v[part], sinks))
        results.append(torch.cat(parts))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_threads_share_the_work_without_changing_it(library: ctypes.CDLL) -> None:
    """Many loops of every length, in threads that fall asleep and wake between them: always the same bits."""
    tiles = [to_tiles(weight(T.Q4_1, rows, 96, seed=rows)) for rows in (4, 64, 1000)]
    linears = [NativePackedLinear(library, tiled) for tiled in tiles if tiled is not None]
    ops, w = NativeOps(library), randn(96, seed=1)
    inputs = [randn(rows, 96, seed=rows) for rows in (1, 2, 30, 700)]
    try:
        assert library.tl_set_threads(1) == 1
        want = [[*(linear(x) for linear in linears), ops.rms_norm(x, w, 1e-5)] for x in inputs]
        for threads in (2, 5, 3):
            assert library.tl_set_threads(threads) == threads
            for turn in range(24):
                for x, expected in zip(inputs, want, strict=True):
                    got = [*(linear(x) for linear in linears), ops.rms_norm(x, w, 1e-5)]
                    assert all(map(torch.equal, got, expected)), (threads, turn)
                if turn % 8 == 0:
                    threading.Event().wait(0.002)  # longer than a helper looks for work before it sleeps
    finally:
        library.tl_set_threads(torch.get_num_threads())


def test_threads_that_call_at_once_get_their_own_results(library: ctypes.CDLL) -> None:
    """The pool serves one loop at a time; whoever comes meanwhile does its own alone."""
    ops, w, callers = NativeOps(library), randn(96, seed=1), 4
    inputs = [randn(700 + n, 96, seed=n) for n in range(callers)]
    want = [ops.rms_norm(x, w, 1e-5) for x in inputs]
    together = threading.Barrier(callers)

    def call(index: int) -> int:
        together.wait()
        return sum(torch.equal(ops.rms_norm(inputs[index], w, 1e-5), want[index]) for _ in range(500))

    try:
        library.tl_set_threads(3)
        with ThreadPoolExecutor(callers) as threads:
            assert list(threads.map(call, range(callers))) == [500] * callers
    finally:
        library.tl_set_threads(torch.get_num_threads())
