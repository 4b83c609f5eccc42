"""Whole models of true shapes and random weights: decode and prefill steps against the roofline, and a served batch.

The bound of a decode step is the time to read its weights and its keys and values at the card's copy rate; that of a
prefill step its products at the matrix rate of the weights' type.
"""

from __future__ import annotations

import time

import torch

from bench.gpu.card import Card
from bench.gpu.engines import BLOCK_SIZE, decode_plan, prefill_plan, serving_runner
from bench.gpu.figures import Figure, seconds
from bench.gpu.shapes import SHAPES, Shape, tiny
from bench.llama_config import llama_config
from engine.assembly import build_scheduler
from engine.config import EngineConfig
from engine.messages import NewRequest
from engine.runner import ModelRunner
from engine.types import SamplingParams

_DECODES = ((1, 1024), (16, 1024), (64, 1024), (256, 1024))
_PREFILL = 8192
_GOAL_PREFILL_SHARE = 0.55
# Tokens per second at batch 1 that we want on an H200, by model.
_GOALS = {"llama-3.1-8b": 200.0, "llama-3.1-8b-awq": 450.0, "llama-3.1-8b-fp8": 380.0, "qwen3-8b": 200.0}
_GOAL_SERVED_SHARE = 0.60


def model(name: str, device: torch.device, card: Card, *, dry: bool) -> list[Figure]:
    """Decode at some batch sizes, one long prompt, and, of the first shape, many requests from start to end."""
    shape = tiny(SHAPES[name]) if dry else SHAPES[name]
    decodes = ((1, 20), (2, 20)) if dry else _DECODES
    prompt = 40 if dry else _PREFILL
    start = time.perf_counter()
    runner = serving_runner(
        shape,
        device,
        max_num_seqs=max(rows for rows, _ in decodes),
        max_num_batched_tokens=prompt,
        max_model_len=prompt + BLOCK_SIZE,
    )
    loaded = time.perf_counter() - start
    figures = [Figure("load_seconds", name, "s", loaded), Figure("weights", name, "GB", _weights(runner) / 1e9)]
    for rows, context in decodes:
        if rows * -(-context // BLOCK_SIZE) >= runner.geometry.num_blocks:
            continue  # a model that leaves no room for so many
        figures.append(_decode(shape, runner, rows, context, device, card, dry=dry))
    figures.append(_prefill(shape, runner, prompt, device, card, dry=dry))
    if name == "llama-3.1-8b":
        figures += _served(shape, runner, card, requests=3 if dry else 256, tokens=16 if dry else 1000)
    return figures


def _weights(runner: ModelRunner) -> int:
    return runner.ledger().weights_bytes


def _decode(
    shape: Shape, runner: ModelRunner, rows: int, context: int, device: torch.device, card: Card, *, dry: bool
) -> Figure:
    plan = decode_plan([context] * rows, shape.spec.vocab_size)
    took = seconds(lambda: runner.execute(plan), device, repeats=1 if dry else 20)
    return Figure(
        "decode",
        f"{shape.name} batch={rows} context={context}",
        "tokens/s",
        rows / took,
        rows / _decode_bound(shape, runner, rows, context, card),
        _GOALS.get(shape.name) if rows == 1 else None,
    )


def _decode_bound(shape: Shape, runner: ModelRunner, rows: int, context: int, card: Card) -> float:
    """Seconds of one step: what is read, at the card's copy rate, or its products, if they take longer."""
    read = shape.read_bytes(rows, _weights(runner)) + rows * context * runner.geometry.bytes_per_token
    return max(read / card.copy, 2 * rows * shape.active_parameters / _matrix_rate(shape, card))


def _prefill(shape: Shape, runner: ModelRunner, length: int, device: torch.device, card: Card, *, dry: bool) -> Figure:
    plan = prefill_plan(length, shape.spec.vocab_size)
    took = seconds(lambda: runner.execute(plan), device, repeats=1 if dry else 3, warm=1)
    bound = length / _prefill_bound(shape, length, card)
    return Figure(
        "prefill", f"{shape.name} prompt={length}", "tokens/s", length / took, bound, _GOAL_PREFILL_SHARE * bound
    )


def _prefill_bound(shape: Shape, length: int, card: Card) -> float:
    """Seconds of a prompt's products: those with weights, and attention under the diagonal."""
    spec = shape.spec
    weights = 2 * length * (shape.active_parameters - spec.vocab_size * spec.hidden_size)
    attention = 2 * spec.num_layers * spec.q_size * length**2
    return weights / _matrix_rate(shape, card) + attention / card.bf16


def _matrix_rate(shape: Shape, card: Card) -> float:
    return card.fp8 if shape.encoding == "fp8" else card.bf16


def _served(shape: Shape, runner: ModelRunner, card: Card, *, requests: int, tokens: int) -> list[Figure]:
    """Requests of `tokens` in and as many out, all there at once, through the scheduler, without HTTP."""
    config = EngineConfig(
        model_path="",
        served_name="",
        max_num_seqs=runner.attention.config.max_num_seqs,
        max_num_batched_tokens=runner.attention.config.max_num_batched_tokens,
        max_waiting=requests,
    )
    scheduler = build_scheduler(config, runner, b"\0" * 32, frozenset())
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    vocabulary = shape.spec.vocab_size
    scheduler.add([NewRequest(i, [(i + 31 * j) % vocabulary for j in range(tokens)], params) for i in range(requests)])
    start = time.perf_counter()
    waste, host, steps = [], 0.0, 0
    while scheduler.has_work:
        began = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        results = runner.execute(plan)
        executed = time.perf_counter()
        scheduler.update(plan, results)
        if plan.num_tokens == len(plan.rows):  # a step of answers only
            steps += 1
            host += planned - began + time.perf_counter() - executed
            held = sum(len(row.block_table) for row in plan.rows) * BLOCK_SIZE
            waste.append(1 - sum(len(row.all_token_ids) for row in plan.rows) / held)
    took = time.perf_counter() - start
    setting = f"{shape.name} requests={requests} in=out={tokens}"
    mean_context = tokens * 3 // 2
    batch = min(requests, runner.attention.config.max_num_seqs)
    best = requests * _prefill_bound(shape, tokens, card)
    best += requests / batch * tokens * _decode_bound(shape, runner, batch, mean_context, card)
    bound = requests * tokens / best
    return [
        Figure("served", setting, "tokens/s", requests * tokens / took, bound, _GOAL_SERVED_SHARE * bound),
        Figure("kv_waste", setting, "%", 100 * sum(waste) / max(1, len(waste)), goal=4.0),
        Figure("scheduler_host_time", setting, "ms per step", 1000 * host / max(1, steps), goal=1.0),
    ]


def transformers_generate(device: torch.device, *, dry: bool) -> list[Figure]:
    """What transformers' `generate` makes of the same shape at batch 1 and 16, beside the engine."""
    import transformers

    spec = (tiny(SHAPES["llama-3.1-8b"]) if dry else SHAPES["llama-3.1-8b"]).spec
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            network = transformers.LlamaForCausalLM(llama_config(spec)).eval()
        finally:
            torch.set_default_dtype(torch.float32)
    count, context = (3, 20) if dry else (64, 1024)
    figures = []
    for rows in (1,) if dry else (1, 16):
        ids = torch.randint(0, spec.vocab_size, (rows, context), device=device)

        def generated(tokens: int, ids: torch.Tensor = ids) -> None:
            network.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)

        prompt = seconds(lambda: generated(1), device, repeats=1, warm=1)
        whole = seconds(lambda: generated(1 + count), device, repeats=1, warm=0)
        rate = rows * count / (whole - prompt)
        setting = f"llama-3.1-8b batch={rows} context={context}"
        figures.append(Figure("decode", setting, "tokens/s", rate, system="transformers"))
    return figures
