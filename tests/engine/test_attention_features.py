"""Windows, sinks and capped scores on a CPU: gathered and compiled, alone and mixed over layers, on poisoned pages."""

from __future__ import annotations

import pytest
import torch

from engine.geometry import step_geometry
from engine.kernels.attn_tile import paged_attention_reference
from engine.layers import native
from engine.layers.attention import AttentionConfig
from engine.layers.attention_cpu import CpuAttention
from tests.engine.models import row

HEADS, KV_HEADS, PAGE, NUM_PAGES = 6, 2, 16, 64
PAGES = [7, 3, 50, 21, 9, 33, 12, 40, 2, 18, 29, 60, 5, 44, 16, 37, 26, 11, 8, 31]


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    library = native.build() if request.param == "compiled" else None
    monkeypatch.setattr(native, "library", lambda: library)


def attention(windows: tuple[int, ...], softcap: float, sinks: bool, head_dim: int, dtype: torch.dtype) -> CpuAttention:
    config = AttentionConfig(
        num_layers=len(windows),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        scale=0.3,
        num_blocks=NUM_PAGES,
        block_size=PAGE,
        dtype=dtype,
        device=torch.device("cpu"),
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_blocks_per_seq=len(PAGES),
        windows=windows,
        softcap=softcap,
        sinks=sinks,
    )
    return CpuAttention(config)


def check(
    lengths: list[tuple[int, int]],  # (new tokens, keys) of each row
    windows: tuple[int, ...],
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
) -> None:
    backend = attention(windows, softcap, sinks is not None, head_dim, dtype)
    generator = torch.Generator().manual_seed(len(lengths))
    backend.kv_cache.fill_(torch.nan)
    free, rows, tables = list(PAGES), [], []
    for number, (new, keys) in enumerate(lengths):
        pages = [free.pop(0) for _ in range(-(-keys // PAGE))]
        tables.append(pages)
        past = torch.randn(len(windows), 2, keys - new, KV_HEADS, head_dim, generator=generator)
        for position in range(keys - new):
            backend.kv_cache[:, :, pages[position // PAGE], position % PAGE] = past[:, :, position].to(dtype)
        rows.append(row([1] * keys, pages, start=keys - new, request_id=number))
    step = step_geometry(rows, PAGE, len(PAGES) * PAGE)
    backend.begin(step)
    for layer, window in enumerate(windows):
        qkv = torch.randn(step.num_tokens, HEADS + 2 * KV_HEADS, head_dim, generator=generator).to(dtype)
        q, k, v = qkv.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), dim=1)
        got = backend.forward(layer, q, k, v, sinks)
        want = paged_attention_reference(
            q,
            backend.kv_cache[layer, 0],
            backend.kv_cache[layer, 1],
            torch.from_numpy(step.block_tables),
            torch.from_numpy(step.query_starts),
            torch.from_numpy(step.seq_lens),
            0.3,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40])
def test_a_window_ends_where_it_should(window: int) -> None:
    """Rows that generate and rows that compute prompts, with as many keys as the window, one fewer, one more."""
    around = sorted({max(1, window + change) for change in (-1, 0, 1, 20)})
    check([(1, keys) for keys in around], (window,))
    check([(keys, keys) for keys in around], (window,))
    check([(7, 7 + keys) for keys in around], (window,))


def test_windows_longer_than_a_piece_of_the_compiled_kernel() -> None:
    check([(1, 319)], (128, 129, 200, 0))
    check([(3, 130), (4, 150)], (127, 128, 129, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_take_turns(dtype: torch.dtype) -> None:
    check([(1, 50), (1, 3), (4, 33), (20, 60)], (16, 0, 16, 5, 0), dtype=dtype)


@pytest.mark.parametrize("head_dim", [32, 24])  # 24: no multiple of the vector width
@pytest.mark.parametrize("window", [0, 20])
def test_sinks_take_their_share(window: int, head_dim: int) -> None:
    sinks = torch.tensor([-3.0, 0.0, 2.0, 5.0, 30.0, -40.0])
    check([(1, 1), (1, 140), (3, 20), (30, 60), (9, 9)], (window, 0), sinks=sinks, head_dim=head_dim)


@pytest.mark.parametrize("window", [0, 20])
def test_capped_scores(window: int) -> None:
    check([(1, 1), (1, 70), (3, 20), (30, 60), (9, 9)], (window, 0), softcap=1.5)
    check([(1, 40), (25, 40)], (window,), softcap=1.5, sinks=torch.linspace(-2, 2, HEADS))


def test_windows_must_be_as_many_as_layers() -> None:
    backend = attention((4, 0), 0.0, False, 32, torch.float32)
    with pytest.raises(ValueError, match="1 windows for 2 layers"):
        AttentionConfig(
            **{field: getattr(backend.config, field) for field in backend.config.__dataclass_fields__}
            | {"windows": (4,)}
        )
