"""Adapters against PEFT on small random models in float32: logits of whole prompts, of chunks and of mixed steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.adapters import ALL, ATTENTION, Adapted, write_adapter
from tests.engine.hf_models import Model, open_folder, write_folder

RANDOM = np.random.default_rng(3)
TEXTS = [[int(token) for token in RANDOM.integers(3, 320, length)] for length in (37, 1, 23, 9)]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]

FAMILIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": ("Llama", {"head_dim": 32}, ALL),
    "phi, fused": ("Phi3", {}, FUSED),
    "qwen 2.5, biases": ("Qwen2", {}, ALL),
    "qwen 3": ("Qwen3", {"head_dim": 32}, ALL),
    "gemma 3": ("Gemma3", {"head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 24}, ALL),
    "mixtral, attention": ("Mixtral", {"num_local_experts": 5}, ATTENTION),
    "gpt-oss, attention": ("GptOss", {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}, ATTENTION),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "rank stabilised": {"use_rslora": True, "r": 8, "lora_alpha": 3},
    "ranks and alphas of modules": {
        "rank_pattern": {"k_proj": 2, "layers.1.mlp.down_proj": 7},
        "alpha_pattern": {"up_proj": 31, "model.layers.2.self_attn.q_proj": 5},
    },
    "some layers": {"layers_to_transform": [1, 3]},
    "a few modules": {"target_modules": ["v_proj", "down_proj"]},
    "by an expression": {"target_modules": r".*\.(q_proj|up_proj)"},
    "all linear": {"target_modules": "all-linear"},
    "excluded": {"exclude_modules": ["k_proj"]},
}


@torch.inference_mode()
def expected(model, text):
    return model(torch.tensor([text])).logits[0]


def assert_close(found, wanted):
    assert (found - wanted).abs().max() < 2e-4 * wanted.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_logits_are_those_of_peft(name: str, tmp_path: Path) -> None:
    family, options, modules = FAMILIES[name]
    base = write_folder(tmp_path / "base", family, **options)
    adapted = write_adapter(tmp_path / "adapter", base, target_modules=modules)
    model = Adapted(Model.load(open_folder(tmp_path / "base"), 128))
    wanted = [expected(adapted, text) for text in TEXTS]
    assert (wanted[0] - expected(base, TEXTS[0])).abs().max() > 0.05 * wanted[0].abs().max()  # it does something
    for chunk in (64, 7, 1):
        found = model.logits([tmp_path / "adapter"] * len(TEXTS), TEXTS, chunk)
        for logits, want in zip(found, wanted, strict=True):
            assert_close(logits, want)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    base = write_folder(folder, "Llama")
    return base, Adapted(Model.load(open_folder(folder), 128))


@pytest.mark.parametrize("name", OPTIONS)
def test_options_mean_what_they_mean_to_peft(name: str, llama: Any, tmp_path: Path) -> None:
    base, model = llama
    adapted = write_adapter(tmp_path, base, **OPTIONS[name])
    found = model.logits([tmp_path], TEXTS[:1], 64)
    assert_close(found[0], expected(adapted, TEXTS[0]))


def test_rows_of_several_adapters_and_of_none_share_a_step(llama: Any, tmp_path: Path) -> None:
    base, model = llama
    models = [write_adapter(tmp_path / "a", base, seed=1), None]
    models += [write_adapter(tmp_path / "b", base, seed=2, r=7, target_modules=["q_proj", "down_proj"]), models[0]]
    folders = [tmp_path / "a", None, tmp_path / "b", tmp_path / "a"]
    for chunk in (64, 5, 1):
        for logits, own, text in zip(model.logits(folders, TEXTS, chunk), models, TEXTS, strict=True):
            assert_close(logits, expected(base if own is None else own, text))
