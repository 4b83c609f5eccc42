"""A folder of safetensors to a folder with four-bit weights, block after block.

Only one block is in memory in floats at a time. Each is calibrated on what the quantised blocks before it make of the
texts, so that it sees the inputs that it will have. Held-out texts run through the original and the quantised blocks
side by side: their perplexities come out at the end.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.layers.linear import decode
from engine.layers.ops_torch import TorchOps
from engine.loader.errors import ModelFileError
from engine.loader.hf_quantization import read_quantization
from engine.loader.progress import Report
from engine.loader.safetensors import INDEX_FILE, Safetensors
from engine.loader.safetensors_writer import Stored, stored, write_folder
from engine.models.spec import ModelSpec
from engine.models.tensors import FloatArray, TensorSource
from engine.quant import words
from engine.quant.int4 import Int4Matrix
from engine.quantize.block import Block
from engine.quantize.products import METHODS, QuantizedBlock, quantize_block

BITS = 4
_MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "attention_output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Perplexity of the held-out texts with the original and the quantised weights; bytes of both folders' tensors."""

    perplexity_before: float
    perplexity_after: float
    bytes_before: int
    bytes_after: int


def quantize_folder(
    folder: Path,
    out: Path,
    source: TensorSource,
    *,
    method: str,
    group_size: int,
    calibration: torch.Tensor,
    held_out: torch.Tensor,
    report: Report = lambda done, total: None,
) -> Outcome:
    """Write the model in `folder`, whose tensors are `source`, to `out` with four-bit matrices.

    calibration, held_out: int64 `[texts, tokens]`. Raises ModelFileError for a model whose shape or names are not those
    of a plain dense one, or that is quantised already; ValueError for group sizes that do not divide its matrices.
    """
    spec, files = source.spec, Safetensors(folder)
    config = json.loads((folder / "config.json").read_bytes())
    _check(folder, files, spec, config, method, group_size)
    embedding = decode([source.embedding()], torch.float32) * spec.embedding_scale
    states = embedding[calibration]
    before = embedding[held_out]
    after = before
    del embedding
    replaced: dict[str, Stored | None] = {}
    length = max(calibration.shape[1], held_out.shape[1])
    for index, (layer, tensors) in enumerate(zip(spec.layers, source.layers(), strict=True)):
        block = Block(spec, layer, tensors, length)
        before = block.run(before)
        inputs = block.record()
        block.run(states)
        quantised = quantize_block(tensors, inputs, method, group_size)
        rounded = Block(spec, layer, quantised.tensors, length)
        states, after = rounded.run(states), rounded.run(after)
        replaced |= _renamed(f"model.layers.{index}", quantised, files, method)
        report(index + 1, spec.num_layers)
    tensors_out = _merge(files, replaced)
    _write(folder, out, tensors_out, config | {"quantization_config": _described(method, group_size)})
    return Outcome(
        perplexity_before=perplexity(source, before, held_out),
        perplexity_after=perplexity(source, after, held_out),
        bytes_before=sum(entry.num_bytes for entry in files.tensors.values()),
        bytes_after=sum(tensor.data.nbytes for tensor in tensors_out.values()),
    )


def perplexity(source: TensorSource, states: torch.Tensor, token_ids: torch.Tensor) -> float:
    """exp of the mean negative log-likelihood of every token after each text's first.

    states: the last block's output, float32 `[texts, tokens, hidden]`; token_ids: `[texts, tokens]`.
    """
    spec, ops = source.spec, TorchOps()
    norm = torch.from_numpy(np.array(source.final_norm(), dtype=np.float32))
    output = decode([source.output()], torch.float32)
    total = 0.0
    for state, tokens in zip(states, token_ids, strict=True):
        logits = ops.rms_norm(state[:-1], norm, spec.norm_eps) @ output.T
        if spec.logit_softcap:
            logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
        total += float(torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum"))
    return math.exp(total / (token_ids.numel() - len(token_ids)))


def _check(
    folder: Path, files: Safetensors, spec: ModelSpec, config: Mapping[str, object], method: str, group_size: int
) -> None:
    if method not in METHODS:
        raise ValueError(f"method {method!r} is none of {', '.join(METHODS)}")
    if read_quantization(folder / "config.json", config) is not None:
        raise ModelFileError(folder, "is quantised already", "Give the original model, in floats")
    needed = [f"model.layers.0.{module}.weight" for module in _MODULES.values()]
    if spec.moe is not None or spec.post_norms or any(name not in files.tensors for name in needed):
        raise ModelFileError(
            folder,
            "is no plain dense model (q, k, v, o, gate, up, down in every block, two norms)",
            "Quantise a model of the Llama, Mistral or Qwen families",
        )
    for columns in {spec.hidden_size, spec.q_size, spec.intermediate_size}:
        if group_size < 32 or group_size % 32 or columns % group_size:
            raise ValueError(
                f"groups of {group_size} do not divide the {columns} columns of a matrix: use a multiple of 32 that "
                f"divides {', '.join(map(str, sorted({spec.hidden_size, spec.q_size, spec.intermediate_size})))}"
            )


def _renamed(prefix: str, block: QuantizedBlock, files: Safetensors, method: str) -> dict[str, Stored | None]:
    """The block's new tensors by name; None for those that are no more."""
    found: dict[str, Stored | None] = {}
    for role, matrix in block.matrices.items():
        name = f"{prefix}.{_MODULES[role]}"
        found[f"{name}.weight"] = None
        found |= {f"{name}.{part}": tensor for part, tensor in _parts(matrix, method).items()}
    for role, values in block.norms.items():
        name = f"{prefix}.{_NORMS[role]}.weight"
        found[name] = _like(files.info(name).dtype, values)
    return found


def _parts(matrix: Int4Matrix, method: str) -> dict[str, Stored]:
    if method == "awq":
        qweight, qzeros, scales = words.to_awq(matrix)
        return {"qweight": stored(qweight), "qzeros": stored(qzeros), "scales": stored(scales.astype(np.float16))}
    qweight, qzeros, scales, g_idx = words.to_gptq(matrix, zeros_less_one=True)
    return {
        "qweight": stored(qweight),
        "qzeros": stored(qzeros),
        "scales": stored(scales.astype(np.float16)),
        "g_idx": stored(g_idx),
    }


def _like(dtype: str, values: FloatArray) -> Stored:
    """`values` in the file's type. They are bfloat16 numbers; what float16 does to them is within its rounding."""
    if dtype == "BF16":
        return Stored(dtype, values.shape, (values.view(np.uint32) >> 16).astype(np.uint16))
    return stored(values.astype(np.float16 if dtype == "F16" else np.float32))


def _merge(files: Safetensors, replaced: Mapping[str, Stored | None]) -> dict[str, Stored]:
    """All tensors of the new folder: the old ones as they lie in their files, and what is new."""
    kept = {
        name: Stored(entry.dtype, entry.shape, files.array(name))
        for name, entry in files.tensors.items()
        if name not in replaced
    }
    return kept | {name: tensor for name, tensor in replaced.items() if tensor is not None}


def _write(folder: Path, out: Path, tensors: Mapping[str, Stored], config: Mapping[str, object]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():  # tokenizer, template, licence
        if path.is_file() and path.suffix != ".safetensors" and path.name not in (INDEX_FILE, "config.json"):
            shutil.copyfile(path, out / path.name)
    write_folder(out, tensors)
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _described(method: str, group_size: int) -> dict[str, object]:
    """As the formats' own tools write it."""
    common: dict[str, object] = {"quant_method": method, "bits": BITS, "group_size": group_size}
    if method == "awq":
        return common | {"version": "gemm", "zero_point": True, "modules_to_not_convert": None}
    return common | {"sym": True, "desc_act": False, "checkpoint_format": "gptq", "true_sequential": False}
