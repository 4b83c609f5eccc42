"""transformers' `generate` on the weights of a Llama-family GGUF file: the peer that `bench.engine` measures.

    python -m bench.transformers_peer MODEL.gguf --dtype bfloat16 --streams 1,8 --runs 3 --threads 2

Prints one line of JSON rows. A process of its own, so that threads and memory of one data type do not touch another's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.engine import ANSWER_TOKENS, PROMPT_TOKENS, VOCABULARY, WARM_UP_TOKENS, Budget, Series, setting
from bench.llama_config import llama_config
from bench.report import Row
from engine.loader.families import GgufTensors
from engine.loader.gguf import GgufFile
from engine.models.tensors import NetworkTensors


def load(path: Path, dtype: torch.dtype) -> Any:
    """transformers' model with the file's weights, dequantised.

    Raises:
        ValueError: the file is not of the Llama family.
    """
    tensors = GgufTensors(GgufFile(path))
    spec = tensors.spec
    if spec.architecture != "llama":
        raise ValueError(f"{path}: the peer knows the Llama family only, not {spec.architecture!r}")
    model = transformers.LlamaForCausalLM(llama_config(spec))
    state = {
        "model.embed_tokens.weight": tensors.embedding().dequantize(),
        "model.norm.weight": tensors.final_norm(),
        "lm_head.weight": tensors.output().dequantize(),
    }
    for index, layer in enumerate(tensors.layers()):
        prefix = f"model.layers.{index}."
        state[prefix + "input_layernorm.weight"] = layer.attention_norm
        state[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm
        for name, tensor in zip("qkv", layer.qkv, strict=True):
            state[f"{prefix}self_attn.{name}_proj.weight"] = tensor.dequantize()
        state[prefix + "self_attn.o_proj.weight"] = layer.attention_output.dequantize()
        if not isinstance(layer.mlp, NetworkTensors):
            raise ValueError(f"{path}: the peer knows no experts")
        for name, tensor in zip(("gate", "up"), layer.mlp.gate_up, strict=True):
            state[f"{prefix}mlp.{name}_proj.weight"] = tensor.dequantize()
        state[prefix + "mlp.down_proj.weight"] = layer.mlp.down.dequantize()
    model.load_state_dict({name: torch.from_numpy(values) for name, values in state.items()})
    return model.to(dtype).eval()


def measure(path: Path, dtype: str, streams: Sequence[int], runs: int, seconds: float) -> list[Row]:
    """Tokens per second of a batch of each size, greedy, prompt included in the time as for the engine."""
    model = load(path, getattr(torch, dtype))
    system, budget = f"transformers {dtype}", Budget(seconds)
    rows: list[Row] = []
    for count in streams:
        series = Series(system, setting(count))
        for run in budget.runs(system, count, runs):
            if run == 0:
                _generate(model, count, WARM_UP_TOKENS)
            start, cpu = time.perf_counter(), time.process_time()
            _generate(model, count, ANSWER_TOKENS)
            tokens = count * ANSWER_TOKENS
            series.add("tokens_per_second", "1/s", tokens / (time.perf_counter() - start))
            series.add("core_cpu_per_token", "ms", 1000 * (time.process_time() - cpu) / tokens)
        rows += series.rows()
    return rows


def _generate(model: Any, count: int, length: int) -> None:
    """`length` greedy tokens after each of `count` random prompts, all in one batch."""
    inputs = torch.randint(VOCABULARY.start, VOCABULARY.stop, (count, PROMPT_TOKENS))
    model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=length,
        min_new_tokens=length,
        do_sample=False,
        pad_token_id=0,
    )


def main() -> None:
    """Parse the command line, measure, print the rows as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.transformers_peer")
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), required=True)
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        # torch then multiplies number by number: one answer takes minutes, and says nothing about transformers.
        print("transformers bfloat16: left out, this processor has no bfloat16 products", file=sys.stderr)
        print("[]")
        return
    rows = measure(options.model, options.dtype, options.streams, options.runs, options.seconds)
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
