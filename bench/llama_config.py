"""The configuration by which transformers builds a Llama of an engine's spec: what its `generate` is measured with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.models.spec import ModelSpec

if TYPE_CHECKING:
    import transformers


def llama_config(spec: ModelSpec) -> transformers.LlamaConfig:
    """Plain rotary embedding, no biases: whatever else `spec` has is left out."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position,
        rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tied_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": spec.ropes[0].theta},
    )
