"""Families of Hugging Face folders as maps: what their config.json leaves unsaid, and what their tensors are called.

A further family whose block differs only by the spec's flags is one more line in `HF_FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.models.spec import Activation


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Where a layer's mixture of experts lies, below `model.layers.N.`.

    Unless `stacked`, expert `E` has its own tensors `{experts}.E.{gate,up,down}.weight`. Stacked ones are
    `{experts}.gate_up_proj`, gate and up alternating, and `{experts}.down_proj`, with biases: gpt-oss.
    """

    router: str
    experts: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class HfFamily:
    """How one architecture differs from Llama. `defaults`: values of keys that its config.json may leave out."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    nested: bool = False  # the language model's configuration is `text_config`
    prefixes: tuple[str, ...] = ("model.",)  # of all tensors but `lm_head`; the first that is there counts
    qkv_bias: bool = False  # always, and not as `attention_bias` says
    qk_norm: bool = False
    post_norms: bool = False
    sinks: bool = False
    fused: bool = False  # `qkv_proj` and `gate_up_proj`
    norm_offset: float = 0.0  # norms multiply by this plus their weight
    scaled_embedding: bool = False  # by the square root of its width
    activation: Activation | None = None  # None: as config.json says
    # Which layers attend to all tokens where `sliding_window` is set and `layer_types` is not: every so many, 0: none.
    full_every: int = 1
    windowed_from: str | None = None  # the key of the first layer that has a window
    window_switch: bool = False  # windows only with `use_sliding_window`
    local_rope: bool = False  # layers with a window have another rotary embedding
    no_rope: bool = False  # some layers have none
    yarn_is_longrope: bool = False
    experts: ExpertNames | None = None


_GEMMA2: dict[str, Any] = {
    "norm_offset": 1.0,
    "scaled_embedding": True,
    "post_norms": True,
    "full_every": 2,
    "defaults": {
        "tie_word_embeddings": True,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "hidden_act": "gelu_pytorch_tanh",
    },
}
_GEMMA3: dict[str, Any] = {
    "norm_offset": 1.0,
    "scaled_embedding": True,
    "post_norms": True,
    "qk_norm": True,
    "full_every": 6,
    "local_rope": True,
    "defaults": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1_000_000.0,
        "hidden_act": "gelu_pytorch_tanh",
    },
}

# By the first of config.json's `architectures`. SmolLM2's call themselves Llama, Phi-4's Phi-3.
HF_FAMILIES = {
    "LlamaForCausalLM": HfFamily(),
    "SmolLM3ForCausalLM": HfFamily(
        no_rope=True, window_switch=True, defaults={"tie_word_embeddings": True, "rope_theta": 2_000_000.0}
    ),
    "MistralForCausalLM": HfFamily(full_every=0, defaults={"sliding_window": 4096}),
    "MixtralForCausalLM": HfFamily(
        full_every=0,
        defaults={"rope_theta": 1_000_000.0, "norm_topk_prob": True},
        experts=ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    ),
    "Qwen2ForCausalLM": HfFamily(
        qkv_bias=True,
        full_every=0,
        window_switch=True,
        windowed_from="max_window_layers",
        defaults={"sliding_window": 4096, "max_window_layers": 28},
    ),
    "Qwen3ForCausalLM": HfFamily(
        qk_norm=True,
        full_every=0,
        window_switch=True,
        windowed_from="max_window_layers",
        defaults={"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    ),
    "Qwen3MoeForCausalLM": HfFamily(
        qk_norm=True,
        full_every=0,
        window_switch=True,
        defaults={"sliding_window": 4096, "norm_topk_prob": False},
        experts=ExpertNames("mlp.gate", "mlp.experts"),
    ),
    "Gemma2ForCausalLM": HfFamily(**_GEMMA2),
    "Gemma3ForCausalLM": HfFamily(**_GEMMA3),
    "Gemma3ForConditionalGeneration": HfFamily(
        nested=True, prefixes=("model.language_model.", "language_model.model."), **_GEMMA3
    ),
    "Phi3ForCausalLM": HfFamily(fused=True, full_every=0, yarn_is_longrope=True),
    "GptOssForCausalLM": HfFamily(
        sinks=True,
        full_every=2,
        activation=Activation.CLAMPED_SWIGLU,
        defaults={
            "head_dim": 64,
            "attention_bias": True,
            "norm_topk_prob": True,
            "sliding_window": 128,
            "rope_theta": 150_000.0,
        },
        experts=ExpertNames("mlp.router", "mlp.experts", stacked=True),
    ),
}
