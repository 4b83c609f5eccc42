"""config.json of a Hugging Face folder as a `ModelSpec`. What it asks for and the decoder does not know is refused.

Both forms of the rotary embedding's keys are read: `rope_theta` with `rope_scaling`, and the newer `rope_parameters`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.loader.errors import ModelFileError
from engine.loader.hf_families import HF_FAMILIES, HfFamily
from engine.loader.hf_pooling import BARE, CLASSIFIER
from engine.loader.hf_rope import read_rope
from engine.loader.hf_values import HfValues
from engine.loader.layers import checked_depth, context_length, plan_layers, repeating
from engine.models.spec import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation, LayerSpec, ModelSpec, MoeSpec

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
_RENAMED = {"Gemma3Text": "Gemma3"}  # classes without an output matrix that are named otherwise


def read_family(path: Path, config: Mapping[str, Any]) -> HfFamily:
    """The family of the parsed config.json at `path`. Raises ModelFileError for one that is not known."""
    listed = config.get("architectures")
    named = name = listed[0] if isinstance(listed, list) and listed else None
    if isinstance(named, str) and named.endswith((CLASSIFIER, BARE)):  # the same blocks with a score head, or with none
        stem = re.sub(f"({CLASSIFIER}|{BARE})$", "", named)
        name = f"{_RENAMED.get(stem, stem)}ForCausalLM"
    if name not in HF_FAMILIES:
        known = ", ".join(sorted(HF_FAMILIES))
        raise ModelFileError(path, f"architecture {named!r} is not supported", f"Use one of: {known}")
    return HF_FAMILIES[name]


def read_hf_spec(path: Path, config: Mapping[str, Any]) -> ModelSpec:
    """The model that the parsed config.json at `path` describes.

    Raises ModelFileError for an unknown architecture, an unsupported feature, or values that contradict each other.
    """
    family = read_family(path, config)
    values = HfValues(path, _language_part(path, config, family), family.defaults)
    _refuse_unsupported(values)
    hidden, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    if hidden < 1 or heads < 1:
        raise ModelFileError(path, f"{heads} attention heads and a width of {hidden}", "Download config.json again")
    head_dim = values.integer("head_dim", hidden // heads)
    bias = values.flag("attention_bias")
    try:
        moe = _experts(values, family)
        layers = _layers(values, family, head_dim, moe)
        scalar = values.number("query_pre_attn_scalar", 0.0)
        scaling = next((layer.rope.scaling for layer in layers if layer.rope and not layer.window), None)
        return ModelSpec(
            architecture=config["architectures"][0],
            layers=layers,
            hidden_size=hidden,
            intermediate_size=values.integer("intermediate_size"),
            num_heads=heads,
            num_kv_heads=values.integer("num_key_value_heads", heads),
            head_dim=head_dim,
            vocab_size=values.integer("vocab_size"),
            max_position=context_length(values.integer("max_position_embeddings"), scaling),
            norm_eps=values.number("rms_norm_eps", 1e-6),
            tied_embeddings=values.flag("tie_word_embeddings"),
            activation=family.activation or _activation(values),
            qkv_bias=family.qkv_bias or bias,
            o_bias=bias,
            mlp_bias=values.flag("mlp_bias"),
            qk_norm=family.qk_norm,
            post_norms=family.post_norms,
            sinks=family.sinks,
            embedding_scale=hidden**0.5 if family.scaled_embedding else 1.0,
            attention_scale=scalar**-0.5 if scalar else None,
            attention_softcap=values.number("attn_logit_softcapping", 0.0),
            logit_softcap=values.number("final_logit_softcapping", 0.0),
            moe=moe,
        )
    except ValueError as error:
        raise ModelFileError(path, str(error), "Download config.json again") from error


def _language_part(path: Path, config: Mapping[str, Any], family: HfFamily) -> Mapping[str, Any]:
    if not family.nested:
        return config
    part = config.get("text_config")
    if not isinstance(part, Mapping):
        raise ModelFileError(path, "text_config is missing", "Download config.json again")
    return part


def _refuse_unsupported(values: HfValues) -> None:
    if values.flag("use_bidirectional_attention"):
        raise values.fault("attention to later tokens is not supported", "Use a model that generates text")
    limits = (values.number("swiglu_limit", SWIGLU_LIMIT), values.number("swiglu_alpha", SWIGLU_ALPHA))
    if limits != (SWIGLU_LIMIT, SWIGLU_ALPHA):
        raise values.fault(
            f"swiglu_limit and swiglu_alpha are {limits[0]} and {limits[1]}",
            f"Only {SWIGLU_LIMIT} and {SWIGLU_ALPHA} are supported",
        )


def _activation(values: HfValues) -> Activation:
    name = values.text("hidden_activation", values.text("hidden_act", "silu"))
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise values.fault(f"activation {name!r} is not supported", f"Use a model with one of: {known}")
    return _ACTIVATIONS[name]


def _layers(values: HfValues, family: HfFamily, head_dim: int, moe: MoeSpec | None) -> tuple[LayerSpec, ...]:
    count = checked_depth(values.integer("num_hidden_layers"))
    window = values.integer("sliding_window", 0)
    if family.window_switch and not values.flag("use_sliding_window"):
        window = 0
    return plan_layers(
        read_rope(values, family, head_dim),
        _windowed(values, family, count),
        window,
        local_rope=read_rope(values, family, head_dim, local=True) if family.local_rope else None,
        without_rope=_without_rope(values, count) if family.no_rope else (),
        experts=_with_experts(values, count) if moe is not None else (),
    )


def _windowed(values: HfValues, family: HfFamily, count: int) -> list[bool]:
    kinds = values.list("layer_types")
    if kinds is None:
        first = values.integer(family.windowed_from) if family.windowed_from else 0
        every = values.integer("sliding_window_pattern", family.full_every)
        return [index >= first and not full for index, full in enumerate(repeating(count, every))]
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != count:
        fault = f"layers of {', '.join(unknown)}" if unknown else f"{len(kinds)} layer_types for {count} layers"
        raise values.fault(f"{fault} are not supported", "Use a model with full or sliding-window attention")
    return [kind == "sliding_attention" for kind in kinds]


def _without_rope(values: HfValues, count: int) -> list[bool]:
    marks = values.list("no_rope_layers")
    if marks is None:
        return repeating(count, values.integer("no_rope_layer_interval", 4))
    if len(marks) < count:
        raise values.fault(f"{len(marks)} no_rope_layers for {count} layers", "Download config.json again")
    return [not mark for mark in marks[:count]]  # 1: this layer has a rotary embedding


def _experts(values: HfValues, family: HfFamily) -> MoeSpec | None:
    if family.experts is None:
        return None
    return MoeSpec(
        num_experts=values.integer("num_experts", values.integer("num_local_experts", 0)),
        top_k=values.integer("num_experts_per_tok"),
        intermediate_size=values.integer("moe_intermediate_size", values.integer("intermediate_size")),
        renormalise=values.flag("norm_topk_prob"),
        bias=family.experts.stacked,
    )


def _with_experts(values: HfValues, count: int) -> list[bool]:
    dense = set(values.list("mlp_only_layers") or ())
    sparse = repeating(count, values.integer("decoder_sparse_step", 1))
    return [sparse[index] and index not in dense for index in range(count)]
