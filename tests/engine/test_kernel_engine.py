"""The kernels in their places: behind the attention interface, and in a whole engine that generates with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.geometry import step_geometry
from engine.layers.attention import AttentionBackend, AttentionConfig, StepGeometry
from engine.layers.attention_cpu import CpuAttention
from engine.layers.attention_triton import TritonAttention
from engine.layers.linear import LinearPolicy
from engine.layers.ops_triton import TritonOps
from engine.load_runner import load_runner
from engine.loader.families import GgufTensors
from engine.loader.gguf import GgufFile
from engine.models.decoder import Decoder
from engine.runner import ModelRunner
from engine.sampler import Sampler
from engine.sampling.on_device import DeviceSampling
from engine.types import StepPlan, StepRow
from tests.engine.kernel_support import kernel_device
from tests.engine.models import GREEDY, generate, row, write_model

CPU = torch.device("cpu")
BLOCK_SIZE = 16


def config(device: torch.device, **changes: object) -> AttentionConfig:
    standard = AttentionConfig(
        num_layers=2,
        num_heads=3,
        num_kv_heads=1,
        head_dim=32,
        scale=32**-0.5,
        num_blocks=24,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=device,
        max_num_seqs=4,
        max_num_batched_tokens=96,
        max_blocks_per_seq=20,
    )
    return dataclasses.replace(standard, **changes)  # type: ignore[arg-type]


def geometry(query_lens: Sequence[int], seq_lens: Sequence[int], pages: Sequence[Sequence[int]]) -> StepGeometry:
    rows = [
        StepRow(i, [0] * query, seq - query, table, False, GREEDY, [0] * seq, seq)
        for i, (query, seq, table) in enumerate(zip(query_lens, seq_lens, pages, strict=True))
    ]
    return step_geometry(rows, BLOCK_SIZE, 320)


def poison(backend: AttentionBackend) -> None:
    """Every page but the null page holds NaN until somebody writes to it."""
    backend.kv_cache[:, :, 1:] = float("nan")


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_agrees_with_the_cpu_backend_step_by_step(deterministic: bool) -> None:
    """Prefill, chunks, mixed and pure decode steps, each from the pages that the step before left."""
    device = kernel_device()
    cpu, triton = CpuAttention(config(CPU)), TritonAttention(config(device), deterministic=deterministic)
    poison(cpu)
    poison(triton)
    generator = torch.Generator().manual_seed(3)
    pages = [[5, 2, 9], list(range(20, 2, -2)) + list(range(19, 8, -2)), [22, 3]]
    pages[1] = [page for page in pages[1] if page not in (2, 5, 9, 22, 3)]
    lengths = [0, 0, 0]
    for step in ([30, 0, 5], [1, 64, 0], [1, 1, 20], [0, 60, 0], [1, 1, 1]):
        active = sorted((i for i in range(3) if step[i]), key=lambda i: step[i] != 1)  # single tokens first
        query_lens = [step[i] for i in active]
        lengths = [length + new for length, new in zip(lengths, step, strict=True)]
        plan = geometry(query_lens, [lengths[i] for i in active], [pages[i] for i in active])
        cpu.begin(plan)
        triton.begin(plan)
        for layer in range(2):
            qkv = torch.randn(sum(query_lens), 5, 32, generator=generator)
            q, k, v = qkv[:, :3], qkv[:, 3:4], qkv[:, 4:]
            expected = cpu.forward(layer, q, k, v)
            actual = triton.forward(layer, q.to(device), k.to(device), v.to(device))
            torch.testing.assert_close(actual.cpu(), expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(triton.kv_cache.cpu(), cpu.kv_cache, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("query_lens", [(1, 1, 1), (40, 2, 3)], ids=["decode", "prefill"])
def test_deterministic_rows_do_not_depend_on_their_mates(query_lens: tuple[int, int, int]) -> None:
    device = kernel_device()
    backend = TritonAttention(config(device), deterministic=True)
    backend.kv_cache.normal_(generator=torch.Generator(device=device).manual_seed(0))
    seq_lens, pages = (300, 5, 20), [list(range(1, 20)), [20], [21, 22]]
    qkv = torch.randn(sum(query_lens), 5, 32, generator=torch.Generator().manual_seed(1)).to(device)

    def first_row(rows: int) -> torch.Tensor:
        tokens = sum(query_lens[:rows])
        backend.begin(geometry(query_lens[:rows], seq_lens[:rows], pages[:rows]))
        return backend.forward(0, qkv[:tokens, :3], qkv[:tokens, 3:4], qkv[:tokens, 4:])[: query_lens[0]]

    assert torch.equal(first_row(1), first_row(3))


def test_warm_up_leaves_the_pages_as_they_were() -> None:
    backend = TritonAttention(config(kernel_device(), max_num_seqs=1, max_num_batched_tokens=1))
    backend._warm_up()
    assert not backend.kv_cache.any()


def test_a_step_beyond_the_configured_bounds_is_refused() -> None:
    backend = TritonAttention(config(kernel_device(), max_num_seqs=2))
    with pytest.raises(ValueError, match="exceeds the 2"):
        backend.begin(geometry([1] * 3, [1] * 3, [[1], [2], [3]]))


def triton_runner(path: Path) -> ModelRunner:
    """The runner that `load_runner` builds on CUDA, in float32 and on the device of these tests."""
    file = GgufFile(path)
    source = GgufTensors(file)
    spec, device = source.spec, kernel_device()
    attention = TritonAttention(
        config(
            device,
            num_layers=spec.num_layers,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.head_dim**-0.5,
        )
    )
    poison(attention)
    policy = LinearPolicy(device, torch.float32, packed_rows=0)
    decoder = Decoder(source, policy, attention, TritonOps(), max_position=320)
    sampler = Sampler(frozenset(), DeviceSampling(attention.config.max_num_seqs, spec.vocab_size, device))
    return ModelRunner(decoder, attention, sampler, max_model_len=320)


def generate_together(engine: ModelRunner, prompts: Sequence[Sequence[int]], count: int, chunk: int) -> list[list[int]]:
    """Greedy continuations of all prompts at once; prompts go in by chunks, beside rows that already decode."""
    tables = [[3, 17, 8, 1], [11, 2, 21], [6, 14, 9, 5]]
    tokens, computed = [list(prompt) for prompt in prompts], [0] * len(prompts)
    while any(len(tokens[i]) < len(prompt) + count for i, prompt in enumerate(prompts)):
        rows = []
        for i, prompt in enumerate(prompts):
            if len(tokens[i]) < len(prompt) + count:
                stop = min(computed[i] + chunk, len(tokens[i]))
                rows.append(row(list(tokens[i]), tables[i], start=computed[i], stop=stop, request_id=i))
        rows.sort(key=lambda one: len(one.token_ids) != 1)
        for one, result in zip(rows, engine.execute(StepPlan(rows)), strict=True):
            assert result.error is None, result.error
            computed[one.request_id] += len(one.token_ids)
            if result.token_id is not None:
                tokens[one.request_id].append(result.token_id)
    return [tokens[i][len(prompt) :] for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_an_engine_on_the_kernels_gives_the_cpu_engines_tokens(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, architecture=architecture)
    random = np.random.default_rng(7)
    prompts = [random.integers(0, 320, size).tolist() for size in (40, 3, 33)]
    cpu = load_runner(path, precision="float32", max_model_len=320, kv_cache_bytes=2**24, device="cpu")
    expected = [generate(cpu, prompt, 8, pages=[1, 2, 3, 4]) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 8, "the model repeats itself and proves nothing"
    assert generate_together(triton_runner(path), prompts, 8, chunk=16) == expected
