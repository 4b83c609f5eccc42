"""EAGLE-3 heads for tests: written as folders, and computed again in a few lines of torch, without pages or cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from engine.models.spec import ModelSpec

Weights = dict[str, torch.Tensor]
HEADS, KV_HEADS, HEAD_DIM, INNER, EPS, THETA = 4, 2, 16, 96, 1e-5, 10_000.0
TAPS = (1, 3, 4)


def random_weights(target: ModelSpec, draft_vocab: int, seed: int = 0) -> Weights:
    """A head under the authors' names."""
    torch.manual_seed(seed)
    hidden = target.hidden_size
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj": (INNER, hidden),
        "midlayer.mlp.up_proj": (INNER, hidden),
        "midlayer.mlp.down_proj": (hidden, INNER),
        "lm_head": (draft_vocab, hidden),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    weights = {f"{name}.weight": torch.randn(shape) * 0.15 for name, shape in shapes.items()}
    for name in (*(f"midlayer.{norm}" for norm in norms), "norm"):
        weights[f"{name}.weight"] = 1 + 0.1 * torch.randn(hidden)
    tokens = torch.randperm(target.vocab_size)[:draft_vocab].sort().values
    weights["d2t"] = tokens - torch.arange(draft_vocab)
    weights["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
    return weights


def config_of(target: ModelSpec, weights: Weights) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": len(weights["lm_head.weight"]),
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
        "hidden_act": "silu",
    }


def write_head(path: Path, weights: Weights, config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    save_file({name: value.detach().contiguous() for name, value in weights.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def inner_states(model: transformers.PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """What enters the tapped layers of transformers' model, `[tokens, 3 * hidden]`."""
    with torch.no_grad():
        states = model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
    return torch.cat([states[tap][0] for tap in TAPS], dim=-1)


def entries(
    weights: Weights, embedded: torch.Tensor, fused: torch.Tensor, *, norm_before_residual: bool = False
) -> torch.Tensor:
    """What every entry yields. `[n, hidden]`: embedded, of tokens 1 to n; fused, of positions 0 to n - 1."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weights[f"{name}.weight"]

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"midlayer.{name}.weight"].T

    def turned(x: torch.Tensor) -> torch.Tensor:
        frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.outer(torch.arange(len(x)).float(), frequencies)[:, None]
        one, two = x.chunk(2, dim=-1)
        return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], dim=-1)

    states = norm(fused, "midlayer.hidden_norm")
    x = torch.cat([norm(embedded, "midlayer.input_layernorm"), states], dim=-1)
    n, group = len(x), HEADS // KV_HEADS
    q = turned(project(x, "self_attn.q_proj").view(n, HEADS, HEAD_DIM))
    k = turned(project(x, "self_attn.k_proj").view(n, KV_HEADS, HEAD_DIM)).repeat_interleave(group, 1)
    v = project(x, "self_attn.v_proj").view(n, KV_HEADS, HEAD_DIM).repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
    scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
    x = (states if norm_before_residual else fused) + project(attended, "self_attn.o_proj")
    y = norm(x, "midlayer.post_attention_layernorm")
    gated = torch.nn.functional.silu(project(y, "mlp.gate_proj")) * project(y, "mlp.up_proj")
    return x + project(gated, "mlp.down_proj")


def head_logits(weights: Weights, yielded: torch.Tensor) -> torch.Tensor:
    """Over the draft vocabulary."""
    normed = yielded * torch.rsqrt(yielded.pow(2).mean(-1, keepdim=True) + EPS) * weights["norm.weight"]
    return normed @ weights["lm_head.weight"].T


def expected_drafts(
    model: transformers.PreTrainedModel, weights: Weights, tokens: Sequence[int], count: int, **options: bool
) -> tuple[list[int], torch.Tensor]:
    """The likeliest drafts behind a text, and the logits of the first, `[draft vocabulary]`."""
    embedding = model.get_input_embeddings().weight.detach()
    fused = inner_states(model, tokens)[:-1] @ weights["fc.weight"].T
    known, text, first = weights["d2t"] + torch.arange(len(weights["d2t"])), list(tokens), None
    while len(text) < len(tokens) + count:
        yielded = entries(weights, embedding[text[1:]], fused, **options)[-1:]
        logits = head_logits(weights, yielded)[0]
        first = logits if first is None else first
        text.append(int(known[logits.argmax()]))
        fused = torch.cat([fused, yielded])
    assert first is not None
    return text[len(tokens) :], first
