"""A model in several processes gives what it gives in one: logits and tokens, for every family and every layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from engine.config import EngineConfig
from engine.geometry import step_geometry
from engine.loader import open_model
from engine.open_runner import open_runner
from engine.parallel.errors import PeersLost
from engine.parallel.leader import LeadingRunner
from engine.runner import ModelRunner
from engine.types import Draw, RowResult, SamplingParams, StepPlan
from tests.engine import tokenizer_kinds
from tests.engine.hf_models import write_folder
from tests.engine.models import generate, row, write_model
from tests.engine.parallel_ranks import Pool

PAGE = 16
TOKENS = [int(token) for token in np.random.default_rng(3).integers(3, 320, 50)]
PAGES = [7, 3, 9, 5]
# A vocabulary that no number of ranks divides, and fewer key-value heads than four ranks.
SMALL: dict[str, Any] = {"vocab_size": 603}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "head_dim": 32,
            "mlp_only_layers": [3],
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 12,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 20}),
    "gpt-oss": ("GptOss", {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 32, "sliding_window": 12}),
}
CASES = [
    ("llama", 2, 1),
    ("llama", 4, 1),
    ("llama", 1, 2),
    ("llama", 2, 2),
    ("qwen3", 2, 1),
    ("qwen3", 1, 3),
    ("qwen3-moe", 4, 1),
    ("qwen3-moe", 2, 2),
    ("gemma3", 2, 1),
    ("gemma3", 2, 2),
    ("phi3", 2, 1),
    ("gpt-oss", 2, 1),
    ("gguf", 2, 1),
    ("gguf", 1, 2),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, (family, options) in FAMILIES.items():
        tokenizer_kinds.write_folder(root / name, "byte level")
        write_folder(root / name, family, **SMALL | options)
    write_model(root / "gguf", encoding=GGMLQuantizationType.Q4_0, sizes={"intermediate_size": 192})
    return {name: root / name for name in (*FAMILIES, "gguf")}


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, ModelRunner]:
    """Each model in this process alone."""
    return {name: _alone(path) for name, path in models.items()}


def _alone(path: Path) -> ModelRunner:
    return open_runner(_config(path), open_model(path), threads=1)


def _config(path: Path, tensor: int = 1, pipeline: int = 1, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model_path=str(path),
        served_name="m",
        precision="float32",
        device="cpu",
        max_model_len=128,
        max_num_seqs=8,
        kv_cache_bytes=4 << 20,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        **settings,
    )


@torch.inference_mode()
def logits(runner: ModelRunner, chunk: int) -> torch.Tensor:
    """Of all positions of `TOKENS`, float32 `[tokens, vocab]`."""
    parts = []
    for start in range(0, len(TOKENS), chunk):
        stop = min(start + chunk, len(TOKENS))
        step = step_geometry([row(TOKENS, PAGES, start=start, stop=stop)], PAGE, runner.max_model_len)
        states = runner.forward(np.array(TOKENS[start:stop]), step, np.arange(stop - start))
        parts.append(runner.decoder.logits(states).clone())
    return torch.cat(parts)


@pytest.mark.parametrize(("name", "tensor", "pipeline"), CASES)
def test_logits_and_tokens_equal_those_of_one_process(
    name: str,
    tensor: int,
    pipeline: int,
    pool: Pool,
    models: dict[str, Path],
    alone: dict[str, ModelRunner],
    tmp_path: Path,
) -> None:
    with pool.runner(_config(models[name], tensor, pipeline), tmp_path / "meeting") as runner:
        for chunk in (len(TOKENS), 7):
            want = logits(alone[name], chunk)
            torch.testing.assert_close(logits(runner, chunk), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
        assert generate(runner, TOKENS[:20], 8, pages=PAGES) == generate(alone[name], TOKENS[:20], 8, pages=PAGES)


def test_a_step_of_all_kinds_of_rows_yields_the_same(
    pool: Pool, models: dict[str, Path], alone: dict[str, ModelRunner], tmp_path: Path
) -> None:
    """Drafts, log-probabilities of the prompt, siblings, seeds; then a copy of pages, and a row that reads it."""
    seeded = SamplingParams(temperature=0.9, seed=5, logprobs=2)
    draft = replace(row(TOKENS[:20], [4, 6], start=16), num_drafts=3, all_token_ids=TOKENS[:17], sample=True)
    scored = replace(row(TOKENS[:33], PAGES, params=seeded), score_from=1, draws=(Draw(8, replace(seeded, seed=6)),))
    first = StepPlan([row(TOKENS[:16], [4], request_id=1), scored])
    second = StepPlan([draft])
    third = StepPlan([row(TOKENS[:34], [11, 12, 13], start=33)], copies=[(7, 11), (3, 12), (9, 13)])
    with pool.runner(_config(models["llama"], 2, 2), tmp_path / "meeting") as runner:
        for plan in (first, second, third):
            got, want = runner.execute(plan), alone["llama"].execute(plan)
            assert [_tokens(result) for result in got] == [_tokens(result) for result in want]
            assert all(result.error is None for result in got)
            values = [_logprobs(result) for result in (*got, *want)]
            half = len(values) // 2
            for mine, theirs in zip(values[:half], values[half:], strict=True):
                np.testing.assert_allclose(mine, theirs, atol=1e-4)


def _tokens(result: RowResult) -> tuple[Sequence[int], list[Sequence[int]]]:
    return result.token_ids, [draw.token_ids for draw in result.draws]


def _logprobs(result: RowResult) -> list[float]:
    return [entry.logprob for entry in (*result.logprobs, *result.prompt_logprobs)]


def test_pages_are_as_many_as_the_smallest_rank_has(pool: Pool, models: dict[str, Path], tmp_path: Path) -> None:
    """Of four layers in three stages, one has two."""
    with pool.runner(_config(models["gpt-oss"], 1, 3), tmp_path / "meeting") as runner:
        per_block = 2 * 2 * 2 * 32 * 4 * PAGE  # K and V, of the two layers that the largest stage has
        assert runner.geometry.num_blocks == (4 << 20) // per_block
        assert runner.attention.kv_cache.shape[2] == runner.geometry.num_blocks


def test_a_fault_on_rank_0_in_the_middle_of_a_step_ends_it_for_good(alone: dict[str, ModelRunner]) -> None:
    with pytest.raises(PeersLost, match="ValueError: request 0: 1 pages for 20 tokens"):
        LeadingRunner(alone["llama"]).execute(StepPlan([row(TOKENS[:20], [1])]))  # one page too few
