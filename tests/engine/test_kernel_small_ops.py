"""RMSNorm, rotary embedding, gated activation and KV write equal their references, on odd sizes and strided views."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.gated import gated_launch
from engine.kernels.kv_write import kv_write_launch, kv_write_reference
from engine.kernels.rms_norm import rms_norm_launch, rms_norm_reference
from engine.kernels.rotary import rotary_launch, rotary_reference
from engine.layers.ops_torch import TorchOps
from engine.layers.ops_triton import TritonOps
from engine.models.spec import Activation
from tests.engine.kernel_support import assert_close, kernel_device

# Interpreted stores to bfloat16 cut off instead of rounding: bfloat16 is left to the tolerance of its last digit.
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(kernel_device(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [64, 576, 1000])
def test_rms_norm(hidden: int, dtype: torch.dtype) -> None:
    x = random(5, hidden + 16, dtype=dtype)[:, :hidden]
    weight = random(hidden, dtype=dtype, seed=1)
    out = torch.full((5, hidden), float("nan"), dtype=dtype, device=x.device)
    rms_norm_launch(x, weight, 1e-5, out).run()
    assert_close(out, rms_norm_reference(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_adds_the_residual_first(dtype: torch.dtype) -> None:
    x, residual, weight = random(4, 576, dtype=dtype), random(4, 576, dtype=dtype, seed=1), random(576, dtype=dtype)
    before = residual.clone()
    out = torch.empty_like(x)
    rms_norm_launch(x, weight, 1e-6, out, residual).run()
    assert_close(residual, before.float() + x.float(), dtype)
    assert_close(out, rms_norm_reference(residual, weight, 1e-6), dtype)


def test_rms_norm_of_tiny_values_is_ruled_by_eps() -> None:
    x = torch.full((1, 64), 1e-4, device=kernel_device())
    out = torch.empty_like(x)
    rms_norm_launch(x, torch.ones(64, device=x.device), 1e-2, out).run()
    torch.testing.assert_close(out, torch.full_like(x, 1e-4 / (1e-8 + 1e-2) ** 0.5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (96, 72), (128, 96), (256, 256)])
def test_rotary_turns_pairs_and_leaves_the_rest(head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    heads, kv_heads, tokens = 9, 3, 4
    qkv = random(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    positions = torch.tensor([0, 7, 3, 99], device=qkv.device)
    angles = torch.outer(torch.arange(100.0), 1.0 / 10000 ** (torch.arange(0, rotary_dim, 2) / rotary_dim))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(qkv.device)
    before = qkv.clone()
    rotary_launch(q, k, cos_sin, positions).run()
    assert_close(q, rotary_reference(before[:, :heads], cos_sin, positions), dtype)
    assert_close(k, rotary_reference(before[:, heads : heads + kv_heads], cos_sin, positions), dtype)
    assert torch.equal(v, before[:, heads + kv_heads :])
    assert torch.equal(qkv[..., rotary_dim:], before[..., rotary_dim:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", Activation, ids=lambda kind: kind.value)
@pytest.mark.parametrize("intermediate", [1, 1024, 1536])
def test_gated_activations(intermediate: int, activation: Activation, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * intermediate, dtype=dtype) * 4
    out = torch.full((3, intermediate), float("nan"), dtype=dtype, device=gate_up.device)
    gated_launch(gate_up, out, activation).run()
    assert_close(out, TorchOps().gated(gate_up.float(), activation), dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, under the interpreter: infinity is meant
def test_silu_of_extreme_gates_is_finite() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 2.0, 3.0]], device=kernel_device())
    out = torch.empty(1, 2, device=gate_up.device)
    gated_launch(gate_up, out).run()
    torch.testing.assert_close(out, torch.tensor([[0.0, 3e4]], device=out.device), atol=0, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 64), (1, 80), (8, 128)])
def test_kv_write_fills_its_slots_and_no_other(kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    qkv = random(5, 4 * kv_heads, head_dim, dtype=dtype)
    k, v = qkv[:, 2 * kv_heads : 3 * kv_heads], qkv[:, 3 * kv_heads :]
    slots = torch.tensor([17, -1, 0, 63, 32], device=qkv.device)  # -1: padding
    caches = [random(2, 4, 16, kv_heads, head_dim, dtype=dtype, seed=1) for _ in range(2)]
    kv_write_launch(k, v, caches[0][0], caches[0][1], slots).run()
    kv_write_reference(k, v, caches[1][0], caches[1][1], slots)
    assert torch.equal(caches[0], caches[1])
    assert torch.equal(caches[0][1].view(64, kv_heads, head_dim)[63], v[3])


def test_block_ops_agree_with_plain_torch() -> None:
    """The CUDA and the torch implementation of `BlockOps` are one thing, in-place effects included."""
    ops, plain = TritonOps(), TorchOps()
    x, weight, residual = random(6, 96), random(96, seed=1), random(6, 96, seed=2)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5))
    by_head = random(6, 4, 64)
    torch.testing.assert_close(ops.rms_norm(by_head, weight[:64], 1e-5), plain.rms_norm(by_head, weight[:64], 1e-5))
    residuals = residual.clone(), residual.clone()
    normed = ops.add_rms_norm(x, residuals[0], weight, 1e-5), plain.add_rms_norm(x, residuals[1], weight, 1e-5)
    torch.testing.assert_close(normed[0], normed[1])
    torch.testing.assert_close(residuals[0], residuals[1])
    torch.testing.assert_close(ops.gated(x, Activation.SILU), plain.gated(x, Activation.SILU))
    q, k, cos_sin = random(6, 4, 32), random(6, 2, 32), random(10, 32)
    positions = torch.arange(6, device=q.device)
    rotated = ops.rotary(q.clone(), k.clone(), cos_sin, positions), plain.rotary(q, k, cos_sin, positions)
    torch.testing.assert_close(rotated[0], rotated[1])
    with pytest.raises(ValueError, match="contiguous"):
        ops.add_rms_norm(x, random(6, 192)[:, ::2], weight, 1e-5)
