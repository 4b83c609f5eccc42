"""The kernels in their places: behind the attention interface, and in a whole engine that generates with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from engine.layers.attention import AttentionBackend, AttentionConfig, StepGeometry
from engine.layers.attention_cpu import CpuAttention
from engine.layers.attention_triton import TritonAttention
from engine.layers.linear import LinearPolicy
from engine.layers.ops import BlockOps
from engine.layers.ops_torch import TorchOps
from engine.layers.ops_triton import TritonOps
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec, RopeSpec
from engine.models.tensors import FloatArray, LayerTensors
from engine.quant.blocks import BlockTensor
from engine.runner import ModelRunner, step_geometry
from engine.sampler import Sampler
from engine.types import SamplingParams, StepPlan, StepRow
from tests.engine.kernel_support import kernel_device

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
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


def test_deterministic_decode_does_not_depend_on_batch_mates() -> None:
    device = kernel_device()
    backend = TritonAttention(config(device), deterministic=True)
    backend.kv_cache.normal_(generator=torch.Generator(device=device).manual_seed(0))
    long_row, pages = 300, [list(range(1, 20)), [20], [21, 22]]
    qkv = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1)).to(device)

    def first_row(rows: int) -> torch.Tensor:
        backend.begin(geometry([1] * rows, [long_row, 5, 20][:rows], pages[:rows]))
        return backend.forward(0, qkv[:rows, :3], qkv[:rows, 3:4], qkv[:rows, 4:])[0]

    assert torch.equal(first_row(1), first_row(3))


def test_warm_up_leaves_the_pages_as_they_were() -> None:
    backend = TritonAttention(config(kernel_device(), max_num_seqs=1, max_num_batched_tokens=1))
    backend._warm_up()
    assert not backend.kv_cache.any()


def test_a_step_beyond_the_configured_bounds_is_refused() -> None:
    backend = TritonAttention(config(kernel_device(), max_num_seqs=2))
    with pytest.raises(ValueError, match="exceeds the 2"):
        backend.begin(geometry([1] * 3, [1] * 3, [[1], [2], [3]]))


class RandomModel:
    """A `TensorSource` of random weights: two layers, three query heads per KV head, a head size of 32."""

    spec = ModelSpec(
        architecture="llama",
        num_layers=2,
        hidden_size=96,
        intermediate_size=160,
        num_heads=3,
        num_kv_heads=1,
        head_dim=32,
        vocab_size=128,
        max_position=320,
        norm_eps=1e-5,
        rope=RopeSpec(theta=10000.0, rotary_dim=32),
        tied_embeddings=True,
    )

    def _matrix(self, seed: int, rows: int, columns: int) -> BlockTensor:
        values = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32) * columns**-0.5
        data = np.ascontiguousarray(values.astype(np.float32)).view(np.uint8)
        return BlockTensor(data, GGMLQuantizationType.F32, (rows, columns))

    def embedding(self) -> BlockTensor:
        return self._matrix(1, self.spec.vocab_size, self.spec.hidden_size)

    def output(self) -> BlockTensor:
        return self.embedding()

    def final_norm(self) -> FloatArray:
        return np.ones(self.spec.hidden_size, dtype=np.float32)

    def rope_factors(self) -> FloatArray | None:
        return None

    def layers(self) -> Iterator[LayerTensors]:
        spec = self.spec
        for layer in range(spec.num_layers):
            seed = 100 * (layer + 1)
            yield LayerTensors(
                attention_norm=np.full(spec.hidden_size, 1.5, dtype=np.float32),
                qkv=[
                    self._matrix(seed + i, size, spec.hidden_size)
                    for i, size in enumerate((spec.q_size, spec.kv_size, spec.kv_size))
                ],
                qkv_bias=None,
                q_norm=None,
                k_norm=None,
                attention_output=self._matrix(seed + 3, spec.hidden_size, spec.q_size),
                mlp_norm=np.ones(spec.hidden_size, dtype=np.float32),
                gate_up=[self._matrix(seed + i, spec.intermediate_size, spec.hidden_size) for i in (4, 5)],
                down=self._matrix(seed + 6, spec.hidden_size, spec.intermediate_size),
            )


def runner(attention: AttentionBackend, ops: BlockOps) -> ModelRunner:
    policy = LinearPolicy(attention.config.device, torch.float32, packed_rows=0)
    decoder = Decoder(RandomModel(), policy, attention, ops, max_position=320)
    poison(attention)
    return ModelRunner(decoder, attention, Sampler(frozenset()), max_model_len=320)


def generate(engine: ModelRunner, prompts: Sequence[Sequence[int]], new_tokens: int, chunk: int) -> list[list[int]]:
    """Greedy continuations; prompts go in by chunks, beside the rows that already decode."""
    tables = [[3, 17, 8, 1], [11, 2, 21], [6, 14, 9, 5]]
    tokens = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    wanted = [len(prompt) + new_tokens for prompt in prompts]
    while any(len(tokens[i]) < wanted[i] for i in range(len(tokens))):
        rows = []
        for i in range(len(tokens)):
            todo = tokens[i][computed[i] : computed[i] + chunk]
            if todo and len(tokens[i]) < wanted[i]:
                last = computed[i] + len(todo) == len(tokens[i])
                rows.append(StepRow(i, todo, computed[i], tables[i], last, GREEDY, list(tokens[i]), len(prompts[i])))
        rows.sort(key=lambda row: len(row.token_ids) != 1)
        for row, result in zip(rows, engine.execute(StepPlan(rows)), strict=True):
            assert result.error is None
            computed[row.request_id] += len(row.token_ids)
            if result.token_id is not None:
                tokens[row.request_id].append(result.token_id)
    return [tokens[i][len(prompt) :] for i, prompt in enumerate(prompts)]


def test_an_engine_on_interpreted_kernels_gives_the_cpu_engines_tokens() -> None:
    random = np.random.default_rng(7)
    prompts = [random.integers(0, 128, size).tolist() for size in (40, 3, 33)]
    reference = generate(runner(CpuAttention(config(CPU), use_native=False), TorchOps()), prompts, 12, chunk=320)
    device = kernel_device()
    for chunk in (16, 320):
        assert generate(runner(TritonAttention(config(device)), TritonOps()), prompts, 12, chunk=chunk) == reference
