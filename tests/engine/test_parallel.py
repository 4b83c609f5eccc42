"""A model in several processes gives what it gives in one: logits and tokens, for every family and every layout."""

from __future__ import annotations

from collections.abc import Iterator
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
from engine.runner import ModelRunner
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
