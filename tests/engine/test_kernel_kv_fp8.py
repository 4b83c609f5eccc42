"""A KV cache of eight-bit floats: written with a scale per token and head, read by both attention kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.kernels.attn_tile import paged_attention_reference
from engine.kernels.fp8_pages import Fp8Pages, kv_write_fp8_reference, page_bytes
from engine.kernels.kv_write import kv_write_launch
from engine.layers.attention_cpu import CpuAttention
from engine.layers.attention_triton import TritonAttention
from engine.layers.device import build_attention
from engine.load_runner import load_runner
from engine.loader import open_model
from engine.memory import kv_bytes_per_token
from engine.transfer.page_memory import TensorPages
from tests.engine.kernel_support import assert_close, kernel_device
from tests.engine.models import write_model
from tests.engine.test_kernel_engine import CPU, config, geometry

INTERPRETED = kernel_device().type == "cpu"


def pages_of(blocks: int, kv_heads: int, head_dim: int) -> Fp8Pages:
    raw = torch.full((blocks, page_bytes(16, kv_heads, head_dim)), 0xFF, dtype=torch.uint8, device=kernel_device())
    return Fp8Pages.of(raw, 16, kv_heads, head_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 64), (1, 80), (8, 128)])
def test_writing_fills_its_slots_and_no_other(kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    qkv = torch.randn(5, 4 * kv_heads, head_dim, generator=torch.Generator().manual_seed(0)) * 30
    qkv = qkv.to(kernel_device(), dtype)
    k, v = qkv[:, 2 * kv_heads : 3 * kv_heads], qkv[:, 3 * kv_heads :]
    v[2] = 0.0
    slots = torch.tensor([17, -1, 0, 63, 32], device=qkv.device)  # -1: padding
    written = [pages_of(4, kv_heads, head_dim) for _ in range(2)]
    expected = [pages_of(4, kv_heads, head_dim) for _ in range(2)]
    kv_write_launch(k, v, written[0], written[1], slots, interpreted=INTERPRETED).run()
    for x, got, want in zip((k, v), written, expected, strict=True):
        kv_write_fp8_reference(x, want, slots)
        torch.testing.assert_close(got.scale, want.scale, rtol=1e-6, atol=0, equal_nan=True)
        codes = got.codes.float(), want.codes.float()
        torch.testing.assert_close(*codes, rtol=1 / 8, atol=2**-9, equal_nan=True)
        assert float((codes[0] != codes[1]).logical_and(~codes[1].isnan()).float().mean()) < 0.01
    back = written[0].dequantize().view(64, kv_heads, head_dim)[63]
    torch.testing.assert_close(back, k[3].float(), rtol=2**-4, atol=0.05)


@pytest.mark.parametrize("window", [0, 20])
def test_attention_reads_what_was_written(window: int) -> None:
    """Prefill, then decode beside a longer row: both equal plain attention over the decoded pages."""
    device = kernel_device()
    # Head sizes that are no power of two, a value far from the others' range, and garbage (NaN) in all other pages.
    cfg = config(device, num_layers=1, head_dim=48, fp8=True, windows=(window,) if window else (), dtype=torch.float16)
    backend = TritonAttention(cfg)
    backend.kv_cache[:, :, 1:] = 0xFF
    generator = torch.Generator().manual_seed(3)
    pages, lengths = [[5, 2, 9, 11], list(range(12, 20))], [0, 0]
    for step in ([40, 0], [1, 90], [1, 1]):
        active = sorted((i for i in range(2) if step[i]), key=lambda i: step[i] != 1)
        lengths = [length + new for length, new in zip(lengths, step, strict=True)]
        plan = geometry([step[i] for i in active], [lengths[i] for i in active], [pages[i] for i in active])
        backend.begin(plan)
        qkv = torch.randn(plan.num_tokens, 5, 48, generator=generator)
        qkv[:, 4] *= 1e-3
        qkv = qkv.to(device, torch.float16)
        out = backend.forward(0, qkv[:, :3], qkv[:, 3:4], qkv[:, 4:])
        k_pages, v_pages = (Fp8Pages.of(raw, 16, 1, 48).dequantize() for raw in backend.kv_cache[0])
        want = paged_attention_reference(
            qkv[:, :3],
            k_pages,
            v_pages,
            torch.from_numpy(plan.block_tables).to(device),
            torch.from_numpy(plan.query_starts).to(device),
            torch.from_numpy(plan.seq_lens).to(device),
            cfg.scale,
            window=window,
        )
        assert_close(out * 1000, want * 1000, torch.float16)


def test_results_stay_near_those_of_whole_floats() -> None:
    device = kernel_device()
    whole, short = CpuAttention(config(CPU)), TritonAttention(config(device, fp8=True))
    plan = geometry([60], [60], [[3, 1, 4, 2]])
    whole.begin(plan)
    short.begin(plan)
    qkv = torch.randn(60, 5, 32, generator=torch.Generator().manual_seed(1))
    want = whole.forward(0, qkv[:, :3], qkv[:, 3:4], qkv[:, 4:])
    qkv = qkv.to(device)
    got = short.forward(0, qkv[:, :3], qkv[:, 3:4], qkv[:, 4:]).cpu()
    assert float((got - want).abs().mean() / want.abs().mean()) < 0.05


def test_pages_travel_with_their_scales() -> None:
    backend = TritonAttention(config(kernel_device(), fp8=True))
    backend.kv_cache.random_(0, 255)
    memory = TensorPages(backend.kv_cache)
    assert memory.page_bytes == 2 * 2 * 16 * (32 + 4)  # layers, K and V, tokens, codes and a scale
    (content,) = memory.read([3])
    memory.write([5], [memoryview(content)])
    assert torch.equal(backend.kv_cache[:, :, 3], backend.kv_cache[:, :, 5])


def test_a_cpu_refuses_it() -> None:
    with pytest.raises(ValueError, match="leave kv_dtype at auto on a CPU"):
        build_attention(config(CPU, fp8=True))


def test_the_ledger_counts_what_the_cache_takes(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path)
    spec = open_model(path).spec
    layers, kv_heads, head_dim = spec.num_layers, spec.num_kv_heads, spec.head_dim
    sizes = {"num_layers": layers, "num_heads": spec.num_heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    backend = TritonAttention(config(kernel_device(), fp8=True, **sizes))
    per_token = kv_bytes_per_token(spec, 2, fp8=True)
    assert backend.kv_cache.nbytes == per_token * backend.config.num_blocks * backend.config.block_size
    with pytest.raises(ValueError, match="leave kv_dtype at auto"):
        load_runner(path, device="cpu", kv_dtype="fp8", max_model_len=64)
