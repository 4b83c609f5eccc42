"""Small random models as GGUF files, with the transformers model that holds the same weights; and ways to run them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from engine.geometry import step_geometry
from engine.runner import ModelRunner
from engine.types import SamplingParams, StepPlan, StepRow

GREEDY = SamplingParams(temperature=0.0)
_BYTE_TOKENS = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_HF_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_model(
    path: Path,
    *,
    architecture: str = "llama",
    encoding: GGMLQuantizationType = GGMLQuantizationType.F32,
    encodings: Mapping[str, GGMLQuantizationType] | None = None,
    head_dim: int = 32,
    heads: int = 6,
    tied: bool = True,
    rope_factors: Sequence[float] | None = None,
    linear_factor: float | None = None,
    leave_out: Iterable[str] = (),
    metadata: dict[str, int | str] | None = None,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
) -> transformers.PreTrainedModel:
    """Write a random two-layer model to `path` and return transformers' model with exactly the weights in the file.

    `encodings`: of the matrices whose GGUF names contain the key, instead of `encoding`. `sizes`: fields of
    transformers' configuration, instead of the small ones.
    """
    config_class, model_class = _HF_CLASSES[architecture]
    torch.manual_seed(seed)
    config = config_class(
        **{"vocab_size": 320, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2} | dict(sizes or {}),
        num_attention_heads=heads,
        num_key_value_heads=heads // 3,
        head_dim=head_dim,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}
        if linear_factor is None
        else {"rope_type": "linear", "rope_theta": 10_000.0, "factor": linear_factor},
        attn_implementation="eager",
    )
    if architecture == "qwen2":
        config.head_dim = config.hidden_size // config.num_attention_heads
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 1.0 if name.endswith(("norm.weight", "bias")) else 3.0
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.05 * scale)
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, config, metadata or {}, linear_factor)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
        model.model.rotary_emb.inv_freq /= torch.tensor(rope_factors)
    for name, parameter in model.named_parameters():
        target = gguf_name(name)
        if target in leave_out:
            continue
        values = parameter.detach().numpy()
        if values.ndim == 1:
            writer.add_tensor(target, values)
            continue
        kind = next((kind for part, kind in (encodings or {}).items() if part in target), encoding)
        data = values if kind == GGMLQuantizationType.F32 else _encode(values, kind)
        rounded = torch.from_numpy(dequantize(data, kind)) if data is not values else parameter.detach()
        with torch.no_grad():
            parameter.copy_(rounded)
        if architecture == "llama" and target.endswith(("attn_q.weight", "attn_k.weight")):
            heads = config.num_attention_heads if "attn_q" in target else config.num_key_value_heads
            data = permute(data, heads)
        writer.add_tensor(target, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _encode(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """`values` in the encoding `kind`; for Q6_K, which the gguf package only decodes, random numbers of their size."""
    if kind != GGMLQuantizationType.Q6_K:
        return quantize(values, kind)
    blocks = np.random.default_rng(values.size).integers(0, 256, (values.size // 256, 210), dtype=np.uint8)
    blocks[:, 208:] = np.full((len(blocks), 1), 0.15 / 32 / 128, np.float16).view(np.uint8)
    return blocks.reshape(len(values), -1)


def gguf_name(name: str) -> str:
    """transformers' parameter name as GGUF calls it."""
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in fixed or name == "lm_head.weight":
        return fixed.get(name, "output.weight")
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_NAMES[module]}.{kind}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows as llama-family files store Q and K: halves (i, i + d/2) of each head to neighbours (2i, 2i + 1)."""
    half = rows.shape[0] // heads // 2
    out = np.empty_like(rows)
    for head in range(heads):
        base = head * 2 * half
        for i in range(half):
            out[base + 2 * i] = rows[base + i]
            out[base + 2 * i + 1] = rows[base + half + i]
    return out


def _write_metadata(
    writer: gguf.GGUFWriter,
    config: transformers.PretrainedConfig,
    extra: dict[str, int | str],
    linear_factor: float | None,
) -> None:
    writer.add_name("tiny")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if linear_factor is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(linear_factor)
    others = [chr(256 + i) for i in range(256 - len(_BYTE_TOKENS))]
    tokens = ["<|bos|>", "<|im_end|>", *map(chr, _BYTE_TOKENS), *others]
    tokens += [f"<pad{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges([])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for key, value in extra.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)


def row(
    tokens: Sequence[int],
    pages: Sequence[int],
    *,
    start: int = 0,
    stop: int | None = None,
    request_id: int = 0,
    params: SamplingParams = GREEDY,
    num_prompt_tokens: int | None = None,
) -> StepRow:
    """The row that computes `tokens[start:stop]` and samples if that reaches the end."""
    stop = len(tokens) if stop is None else stop
    prompt = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    return StepRow(request_id, tokens[start:stop], start, pages, stop == len(tokens), params, tokens, prompt)


@torch.inference_mode()
def all_logits(runner: ModelRunner, tokens: Sequence[int], pages: Sequence[int], chunk: int) -> torch.Tensor:
    """float32 logits `[tokens, vocab]`, computed `chunk` positions per step."""
    parts = []
    for start in range(0, len(tokens), chunk):
        step = step_geometry(
            [row(tokens, pages, start=start, stop=min(start + chunk, len(tokens)))],
            runner.geometry.block_size,
            runner.max_model_len,
        )
        runner.attention.begin(step)
        device = runner.attention.config.device
        ids = torch.tensor(tokens[start : start + chunk], device=device)
        positions = torch.from_numpy(step.positions).to(device)
        hidden = runner.decoder.hidden(ids, positions, torch.arange(len(ids), device=device))
        parts.append(runner.decoder.logits(hidden).cpu())
    return torch.cat(parts)


def generate(
    runner: ModelRunner, prompt: Sequence[int], count: int, *, pages: Sequence[int], chunk: int = 1 << 20
) -> list[int]:
    """`count` greedy tokens after `prompt`, one request alone, its prompt in pieces of `chunk`."""
    tokens, done = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        stop = min(done + chunk, len(tokens))
        (result,) = runner.execute(StepPlan([row(tokens, pages, start=done, stop=stop)]))
        assert result.error is None, result.error
        done = stop
        if result.token_id is not None:
            tokens.append(result.token_id)
    return tokens[len(prompt) :]
