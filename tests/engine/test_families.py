"""Every family against transformers on small random models in float32, from Hugging Face folders.

Whole prompts, chunks, token by token, and several texts in one step: the logits of every position.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.layers import native
from engine.loader.errors import ModelFileError
from engine.loader.hf_config import read_hf_spec
from engine.loader.hf_tensors import HfTensors
from engine.memory import Demand, Storage
from tests.engine.hf_models import Model, open_folder, write_folder

RANDOM = np.random.default_rng(5)
TEXTS = [[int(token) for token in RANDOM.integers(3, 320, length)] for length in (45, 1, 33, 17)]
THETA = {"rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **THETA}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    **THETA,
}
PAIRS = [1.0 + index / 3 for index in range(6)]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": PAIRS,
    "long_factor": [4 * pair for pair in PAIRS],
    "partial_rotary_factor": 0.75,
    **THETA,
}
PHI: dict[str, Any] = {
    "rope_parameters": LONGROPE,
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 128,
}
GEMMA: dict[str, Any] = {"head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 24}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 32, "tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, **THETA}}),
    "llama, dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, **THETA}}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN, "max_position_embeddings": 128}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0]}),
    "mistral": ("Mistral", {"sliding_window": 20, "head_dim": 24}),
    "mistral without a window": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "sliding_window": 20}),
    "qwen2": ("Qwen2", {}),
    "qwen2 with windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3, yarn": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN, "max_position_embeddings": 128}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 32},
    ),
    "qwen3-moe, partly dense": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "head_dim": 32,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gemma3, as published": ("Gemma3", {**GEMMA, "num_hidden_layers": 6}),
    "phi3": ("Phi3", {"sliding_window": 20}),
    "phi3, longrope": ("Phi3", PHI),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 32, "sliding_window": 12, "vocab_size": 320},
    ),
}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels are in use: rows of few tokens go through them, longer ones through torch."""
    library = native.build()
    monkeypatch.setattr(native, "library", lambda: library)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(tmp_path: Path, case: str) -> None:
    check(tmp_path, case)


@pytest.mark.parametrize("case", ["llama", "gemma3", "gpt-oss"])
def test_without_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    check(tmp_path, case)


def planned_bytes(source: HfTensors, max_model_len: int) -> int:
    """What the headers say that the weights will take."""
    demand = Demand(
        source.spec,
        list(source.matrices()),
        max_model_len=max_model_len,
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=512,
    )
    return demand.plan(Storage(4, 4, keep_dense=True, packed_bytes=None)).weights_bytes


def check(tmp_path: Path, case: str) -> None:
    family, options = CASES[case]
    reference = write_folder(tmp_path, family, **options)
    source = open_folder(tmp_path)
    assert source.spec.num_parameters == sum(parameter.numel() for parameter in reference.parameters())
    model = Model.load(source, max_model_len=96)
    assert model.decoder.num_bytes == planned_bytes(source, max_model_len=96)
    with torch.inference_mode():
        want = [reference(torch.tensor([text])).logits[0] for text in TEXTS]
    assert want[0].std() > 0.2, "logits this flat would match by accident"
    for chunks in ([96] * 4, [1] * 4, [16, 1, 5, 11]):
        for got, wanted in zip(model.logits(TEXTS, chunks), want, strict=True):
            assert torch.allclose(got, wanted, atol=1e-4, rtol=1e-4), f"chunks {chunks}"


def test_a_context_beyond_the_trained_one_takes_the_long_factors(tmp_path: Path) -> None:
    reference = write_folder(tmp_path, "Phi3", **PHI)
    assert reference.model.rotary_emb.attention_scaling > 1
    text = [int(token) for token in RANDOM.integers(3, 320, 140)]
    with torch.inference_mode():
        want = reference(torch.tensor([text])).logits[0]
    (got,) = Model.load(open_folder(tmp_path), max_model_len=140).logits([text], [50])
    assert torch.allclose(got, want, atol=1e-4, rtol=1e-4)


def test_dynamic_scaling_of_a_context_as_long_as_the_text(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, **THETA}
    reference = write_folder(tmp_path, "Llama", rope_parameters=rope, max_position_embeddings=64)
    text = [int(token) for token in RANDOM.integers(3, 320, 100)]
    source = open_folder(tmp_path)
    assert source.spec.max_position == 128
    with torch.inference_mode():
        want = reference(torch.tensor([text])).logits[0]
    (got,) = Model.load(source, max_model_len=100).logits([text], [100])
    assert torch.allclose(got, want, atol=1e-4, rtol=1e-4)


def test_sharded_and_older_configurations(tmp_path: Path) -> None:
    """Rotary keys as they were written before `rope_parameters`, and weights in several files."""
    reference = write_folder(
        tmp_path, "Gemma3", shard_size="200KB", **GEMMA, layer_types=["sliding_attention", "full_attention"] * 2
    )
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for key in ("rope_parameters", "layer_types", "tie_word_embeddings", "_sliding_window_pattern"):
        del config[key]
    config |= {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "sliding_window_pattern": 2}
    path.write_text(json.dumps(config))
    with torch.inference_mode():
        want = reference(torch.tensor([TEXTS[0]])).logits[0]
    (got,) = Model.load(open_folder(tmp_path), max_model_len=96).logits(TEXTS[:1], [20])
    assert torch.allclose(got, want, atol=1e-4, rtol=1e-4)


def test_the_language_model_of_a_model_that_also_sees(tmp_path: Path) -> None:
    """Its configuration is nested, and leaves out what is usual."""
    reference = write_folder(tmp_path, "Gemma3", **GEMMA)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}))
    from safetensors.torch import load_file, save_file

    weights = load_file(tmp_path / "model.safetensors")
    save_file({f"language_model.{name}": value for name, value in weights.items()}, tmp_path / "model.safetensors")
    with torch.inference_mode():
        want = reference(torch.tensor([TEXTS[0]])).logits[0]
    (got,) = Model.load(open_folder(tmp_path), max_model_len=96).logits(TEXTS[:1], [96])
    assert torch.allclose(got, want, atol=1e-4, rtol=1e-4)
    published = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }
    spec = read_hf_spec(path, published)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262_208)
    assert [layer.window for layer in spec.layers[:7]] == [1024] * 5 + [0, 1024]
    assert spec.num_parameters == 3_880_263_168


def test_bfloat16_stays_close(tmp_path: Path) -> None:
    reference = write_folder(tmp_path, "Gemma3", **GEMMA)
    with torch.inference_mode():
        want = reference(torch.tensor([TEXTS[0]])).logits[0]
    (got,) = Model.load(open_folder(tmp_path), 96, torch.bfloat16).logits(TEXTS[:1], [16])
    assert (got - want).abs().max() / want.abs().max() < 0.1


BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture 'MambaForCausalLM' is not supported.*LlamaForCausalLM"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"hidden_act": "relu2"}, "activation 'relu2' is not supported.*silu"),
        ({"rope_scaling": {"type": "mrope"}}, "rope scaling 'mrope' is not supported.*yarn"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "positive factors"),
        ({"rope_scaling": "linear"}, "'rope_scaling' is 'linear', not an object"),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [1]}}, "'short_factor' is missing"),
        ({"num_hidden_layers": None}, "'num_hidden_layers' is missing"),
        ({"num_hidden_layers": 0}, "0 layers are declared"),
        ({"num_hidden_layers": 10**12}, "1000000000000 layers are declared; a model has 1 to 10000"),
        ({"num_hidden_layers": 2**31, "layer_types": []}, "layers are declared"),
        ({"vocab_size": 10**12}, "a vocabulary of 1000000000000 tokens"),
        ({"hidden_size": 10**400}, "'hidden_size' is 1000.*not a whole number up to"),
        ({"max_position_embeddings": 10**400}, "not a whole number up to"),
        ({"num_hidden_layers": "two"}, "'num_hidden_layers' is 'two', not a whole number"),
        ({"num_hidden_layers": True}, "not a whole number"),
        ({"num_attention_heads": 0}, "0 attention heads"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"rms_norm_eps": "small"}, "not a number"),
        ({"rms_norm_eps": 10**400}, "'rms_norm_eps' is 1000.*not a number"),
        ({"attention_bias": 1}, "not true or false"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of linear_attention are not supported"),
        ({"use_bidirectional_attention": True}, "later tokens"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config is missing"),
        ({"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 2}, "no mixture of experts"),
        ({"architectures": ["GptOssForCausalLM"], "swiglu_limit": 5.0}, "swiglu_limit"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "1 no_rope_layers for 2 layers"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        read_hf_spec(Path("config.json"), BASE | change)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path, "Llama")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"intermediate_size": 100}))
    with pytest.raises(ModelFileError, match=r"gate_proj.weight' has shape \[96, 64\].*asks for \[100, 64\]"):
        list(open_folder(tmp_path).layers())
    path.write_text(json.dumps(config | {"architectures": ["Phi3ForCausalLM"]}))
    with pytest.raises(ModelFileError, match=r"qkv_proj.weight' is missing"):
        list(open_folder(tmp_path).layers())


@pytest.mark.parametrize("family", ["Llama", "Phi3", "Mixtral", "GptOss"])
def test_headers_say_what_the_products_are_made_of(tmp_path: Path, family: str) -> None:
    write_folder(tmp_path, family, num_hidden_layers=2)
    source = open_folder(tmp_path)
    matrices = [(tuple(header.shape), header.encoding) for group in source.matrices() for header in group]
    taken: list[Any] = []
    for layer in source.layers():
        networks = layer.mlp.experts if hasattr(layer.mlp, "experts") else [layer.mlp]
        taken += [*layer.qkv, layer.attention_output]
        for network in networks:
            taken += [*network.gate_up, network.down]
    assert matrices == [(matrix.shape, matrix.encoding) for matrix in [*taken, source.output()]]
