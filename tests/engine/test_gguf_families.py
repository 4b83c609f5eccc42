"""GGUF files of every family, written here by the format's conventions, against the transformers model in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from engine.layers import native
from engine.loader.errors import ModelFileError
from engine.loader.families import GgufTensors, read_spec
from engine.loader.gguf import GgufFile
from tests.engine.hf_models import Model, random_model
from tests.engine.models import permute

RANDOM = np.random.default_rng(5)
TEXTS = [[int(token) for token in RANDOM.integers(3, 320, length)] for length in (45, 20)]
THETA = {"rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, **THETA}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + index / 3 for index in range(6)],
    "long_factor": [2.0 + index for index in range(6)],
    "partial_rotary_factor": 0.75,
    **THETA,
}
GEMMA = {"head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 32}
# architecture -> transformers' class and options, and what the file says beyond the sizes
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama with a window": ("llama", "Mistral", {"sliding_window": 12}, {"attention.sliding_window": 12}),
    "mixtral": (
        "llama",
        "Mixtral",
        {"num_local_experts": 4, "sliding_window": None},
        {"expert_count": 4, "expert_used_count": 2},
    ),
    "smollm3": ("smollm3", "SmolLM3", {"no_rope_layers": [1, 1, 1, 0]}, {}),
    "qwen2, yarn": (
        "qwen2",
        "Qwen2",
        {"rope_parameters": YARN, "max_position_embeddings": 128},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
    ),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
        {"expert_count": 5, "expert_used_count": 3, "expert_feed_forward_length": 40},
    ),
    "phi3": ("phi3", "Phi3", {"sliding_window": 12}, {"attention.sliding_window": 12}),
    "phi3, longrope": (
        "phi3",
        "Phi3",
        {
            "rope_parameters": LONGROPE,
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 16,
        },
        {
            "rope.scaling.original_context_length": 16,
            "rope.scaling.attn_factor": (1 + np.log(8) / np.log(16)) ** 0.5,
            "rope.dimension_count": 12,
        },
    ),
    "gemma2": (
        "gemma2",
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
        {"attention.sliding_window": 12, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "gemma3",
        "Gemma3",
        {
            **GEMMA,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        {
            "attention.sliding_window": 12,
            "rope.freq_base": 1_000_000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "gpt-oss": (
        "gpt-oss",
        "GptOss",
        {
            "head_dim": 32,
            "sliding_window": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {**YARN, "truncate": False},
            "max_position_embeddings": 128,
        },
        {
            "attention.sliding_window": 12,
            "expert_count": 4,
            "expert_used_count": 2,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
}


def tensors_of(model: transformers.PreTrainedModel, arch: str) -> dict[str, np.ndarray]:
    """The model's weights as a GGUF file of the architecture names and lays them out."""
    config, out = model.config, {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if layer is None:
            known = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
            out[known.get(name, "output.weight")] = values
            continue
        prefix, rest = f"blk.{layer[1]}.", layer[2]
        if rest == "self_attn.sinks":
            out[prefix + "attn_sinks.weight"] = values
        elif rest.startswith("mlp.experts."):
            out |= _experts(prefix, rest.removeprefix("mlp.experts."), values, arch)
        else:
            module, kind = rest.rsplit(".", 1)
            target = _NAMES[module]
            if module == "post_attention_layernorm" and (arch.startswith("gemma") or arch == "gpt-oss"):
                target = "post_attention_norm"
            if arch in ("llama", "smollm3") and target in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if target == "attn_q" else config.num_key_value_heads
                values = permute(values, heads)
            out[f"{prefix}{target}.{kind}"] = values
    return out


def _experts(prefix: str, rest: str, values: np.ndarray, arch: str) -> dict[str, np.ndarray]:
    kind = "bias" if rest.endswith("_bias") else "weight"
    if kind == "weight" and arch == "gpt-oss":
        values = values.swapaxes(1, 2)  # [experts, out, in]
    if rest.startswith("down_proj"):
        return {f"{prefix}ffn_down_exps.{kind}": values}
    half = values.shape[1] // 2
    gate, up = (values[:, ::2], values[:, 1::2]) if arch == "gpt-oss" else (values[:, :half], values[:, half:])
    return {f"{prefix}ffn_gate_exps.{kind}": gate, f"{prefix}ffn_up_exps.{kind}": up}


def write(path: Path, model: transformers.PreTrainedModel, arch: str, extra: dict[str, Any]) -> None:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    metadata = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": (config.rope_parameters or {}).get("rope_theta", 10_000.0),
        **extra,
    }
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        add = {int: writer.add_uint32, str: writer.add_string}.get(type(value), writer.add_float32)
        add(f"{arch}.{key}", value)
    tensors = tensors_of(model, arch)
    if config.rope_parameters.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            tensors[f"rope_factors_{kind}.weight"] = np.array(config.rope_parameters[f"{kind}_factor"], np.float32)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    library = native.build()
    monkeypatch.setattr(native, "library", lambda: library)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(tmp_path: Path, case: str) -> None:
    arch, family, options, extra = CASES[case]
    reference = random_model(family, **options)
    path = tmp_path / "tiny.gguf"
    write(path, reference, arch, extra)
    source = GgufTensors(GgufFile(path))
    assert source.spec.num_parameters == sum(parameter.numel() for parameter in reference.parameters())
    with torch.inference_mode():
        want = [reference(torch.tensor([text])).logits[0] for text in TEXTS]
    assert want[0].std() > 0.2, "logits this flat would match by accident"
    model = Model.load(source, max_model_len=64)
    for chunks in ([64] * 2, [1, 7]):
        for got, wanted in zip(model.logits(TEXTS, chunks), want, strict=True):
            assert torch.allclose(got, wanted, atol=1e-4, rtol=1e-4), f"chunks {chunks}"
    matrices = [(tuple(header.shape), header.num_bytes) for group in source.matrices() for header in group]
    taken: list[Any] = []
    for layer in source.layers():
        networks = layer.mlp.experts if hasattr(layer.mlp, "experts") else [layer.mlp]
        taken += [*layer.qkv, layer.attention_output]
        for network in networks:
            taken += [*network.gate_up, network.down]
    assert matrices == [(matrix.shape, matrix.num_bytes) for matrix in [*taken, source.output()]]


def test_windows_by_pattern(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, random_model("Qwen3", head_dim=32), "qwen3", {})
    file = GgufFile(path)
    file.metadata["qwen3.attention.sliding_window"] = 12
    with pytest.raises(ModelFileError, match="sliding-window attention is not supported for 'qwen3'"):
        read_spec(file)
    file.metadata["qwen3.attention.sliding_window_pattern"] = [True, False, False, True]
    assert [layer.window for layer in read_spec(file).layers] == [12, 0, 0, 12]
    file.metadata["qwen3.attention.sliding_window_pattern"] = 2
    assert [layer.window for layer in read_spec(file).layers] == [12, 0, 12, 0]
    file.metadata["qwen3.attention.sliding_window_pattern"] = [True]
    with pytest.raises(ModelFileError, match="1 entries"):
        read_spec(file)
    del file.metadata["qwen3.attention.sliding_window"]
    file.metadata["qwen3.expert_count"] = 4
    with pytest.raises(ModelFileError, match="mixtures of experts are not supported for 'qwen3'"):
        read_spec(file)


def test_models_scaled_by_their_width(tmp_path: Path) -> None:
    """Gemma's largest divides scores by the root of hidden_size / heads; the file tells it by its depth."""
    path = tmp_path / "tiny.gguf"
    write(path, random_model("Gemma3", **GEMMA), "gemma3", {"attention.sliding_window": 12})
    file = GgufFile(path)
    assert read_spec(file).score_scale == 32**-0.5
    file.metadata["gemma3.block_count"] = 62
    assert read_spec(file).score_scale == 16**-0.5
