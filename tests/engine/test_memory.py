"""The memory ledger's arithmetic, and the choice of pages."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from engine.layers import linear_native, native, probe
from engine.limits import DRAWN_AT_ONCE
from engine.load_runner import load_runner
from engine.loader.families import GgufTensors
from engine.loader.gguf import GgufFile
from engine.memory import (
    Demand,
    EngineMemoryError,
    MemoryLedger,
    available_bytes,
    choose_num_blocks,
    kv_bytes_per_token,
    scratch_bytes,
)
from engine.models.rope import RopeSpec
from engine.models.spec import LayerSpec, ModelSpec, MoeSpec
from engine.precision import choose_policy
from tests.engine.byte_tokenizer import write_byte_tokenizer
from tests.engine.models import write_model

T = GGMLQuantizationType
CPU = torch.device("cpu")
# One encoding of every kind: packed, packed in eight bits, without a packed form, and such that do not go together.
MIXED = {"attn_v": T.Q8_0, "ffn_down": T.Q5_0, "ffn_up": T.BF16, "attn_output": T.F16, "token_embd": T.Q8_0}

LLAMA_8B = ModelSpec(
    architecture="llama",
    layers=(LayerSpec(RopeSpec(500_000.0, 128)),) * 32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    max_position=131_072,
    norm_eps=1e-5,
    tied_embeddings=False,
)


def test_published_sizes() -> None:
    assert LLAMA_8B.num_parameters == 8_030_261_248  # the model card's 8.03 billion
    assert kv_bytes_per_token(LLAMA_8B, 2) == 131_072
    assert kv_bytes_per_token(LLAMA_8B, 2, fp8=True) == 67_584  # 132 bytes a head: 128 codes and a scale


def choose(**changes: int | bool | None) -> int:
    options: dict[str, int | bool | None] = {
        "bytes_per_token": 100,
        "block_size": 16,
        "max_model_len": 1000,
        "max_num_seqs": 8,
        "budget_bytes": None,
        "free_bytes": 1 << 30,
        "on_gpu": False,
    }
    return choose_num_blocks(**(options | changes))  # type: ignore[arg-type]


def test_a_budget_is_spent_whole() -> None:
    assert choose(budget_bytes=1600 * 1000) == 1000
    assert choose(budget_bytes=1600 * 1000 + 1599) == 1000


def test_without_a_budget_no_more_than_can_be_used() -> None:
    assert choose() == 63 * 8 + 1
    assert choose(free_bytes=1600 * 400) == 100  # a quarter
    assert choose(free_bytes=1600 * 400, on_gpu=True) == 360


def test_one_sequence_must_fit() -> None:
    assert choose(budget_bytes=1600 * 64) == 64  # 63 pages and the null page
    with pytest.raises(EngineMemoryError, match=r"needs a KV cache of 102,400 bytes, 102,399 .* \(to 992 at most\)"):
        choose(budget_bytes=1600 * 64 - 1)
    with pytest.raises(EngineMemoryError, match="to 0 at most"):
        choose(free_bytes=0)


def test_scratch_covers_logits_and_the_widest_block() -> None:
    few, many = (scratch_bytes(LLAMA_8B, tokens, 1, 2) for tokens in (1, 513))
    assert many - few == 512 * 2 * (2 * 4096 + 3 * 14336 + 2 * (4096 + 2 * 1024))
    # Two copies of every row's logits, nine more of those that are drawn from at once.
    copies = 8 * 2 + (min(9, DRAWN_AT_ONCE) - 1) * 9
    assert scratch_bytes(LLAMA_8B, 1, 9, 2) - few == copies * 4 * 128_256


def test_scratch_covers_what_goes_through_the_experts() -> None:
    """Of every token top_k copies with hidden and inner numbers, where that is more than the dense network takes."""
    layers = tuple(replace(layer, experts=True) for layer in LLAMA_8B.layers)
    sparse = replace(LLAMA_8B, layers=layers, moe=MoeSpec(128, 8, 2048, renormalise=True))
    few, many = (scratch_bytes(sparse, tokens, 1, 2) for tokens in (1, 513))
    assert many - few == 512 * 2 * (2 * 4096 + 8 * (4096 + 2048) + 3 * 4096 + 2 * (4096 + 2 * 1024))


def test_ledger_adds_up() -> None:
    ledger = MemoryLedger(10, 20, 30, 4, 5)
    assert ledger.total_bytes == ledger.as_dict()["total_bytes"] == 60


def test_available_memory_is_plausible() -> None:
    assert 1 << 20 < available_bytes() < 1 << 50


def demand(path: Path, **changes: int | None) -> Demand:
    source = GgufTensors(GgufFile(path))
    options = {"max_model_len": 64, "block_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 512}
    return Demand(source.spec, list(source.matrices()), **options | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
@pytest.mark.parametrize("gain", [0.0, 100.0], ids=["packed and dense", "packed"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_plan_is_what_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str, gain: float, tied: bool
) -> None:
    """To the byte, from the headers alone, for every precision and way of holding weights."""
    library = native.build() if kernels == "compiled" else None
    monkeypatch.setattr(native, "library", lambda: library)
    monkeypatch.setattr(linear_native, "prompt_gain", lambda: gain)
    path = tmp_path / "tiny.gguf"
    for bfloat16_gain in (0.0, 2.0):
        monkeypatch.setattr(probe, "bfloat16_gain", lambda gain=bfloat16_gain: gain)
        for architecture in ("llama", "qwen3"):
            write_model(path, architecture=architecture, encoding=T.Q4_1, encodings=MIXED, tied=tied)
            for precision in ("auto", "float32", "bfloat16"):
                _, plan = choose_policy(precision, CPU, demand(path))
                runner = load_runner(path, device="cpu", precision=precision, max_model_len=64, kv_cache_bytes=1 << 20)
                assert plan.weights_bytes == runner.decoder.num_bytes, (architecture, precision)
                # torch's packed product reads four bits, but not beside eight.
                decoded = ("BF16", "F16", "Q4_1") if library else ("BF16", "F16", "Q4_1", "Q5_0", "Q8_0")
                assert plan.decoded == (decoded if precision == "auto" else ())


def test_what_does_not_fit_is_refused_with_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, encoding=T.Q4_1, encodings=MIXED)
    for precision in ("auto", "float32", "bfloat16"):
        needed = demand(path, kv_cache_bytes=1 << 20)
        _, plan = choose_policy(precision, CPU, needed)
        assert plan.kv_cache_bytes == 1 << 20
        smallest = plan.total_bytes
        if plan.packed_bytes:
            monkeypatch.setattr(linear_native, "prompt_gain", lambda: 100.0)  # no dense copies
            smallest = choose_policy(precision, CPU, needed)[1].total_bytes
        monkeypatch.setattr("engine.precision.free_bytes", lambda device, free=smallest: free)
        choose_policy(precision, CPU, needed)
        monkeypatch.setattr("engine.precision.free_bytes", lambda device, free=smallest - 1: free)
        with pytest.raises(EngineMemoryError) as refusal:
            load_runner(path, device="cpu", precision=precision, max_model_len=64, kv_cache_bytes=1 << 20)
        numbers = [int(word.replace(",", "")) for word in str(refusal.value).split() if word[0].isdigit()]
        assert numbers[:2] == [smallest, smallest - 1]
        assert sum(numbers[2:]) == smallest
        assert ("no packed form for BF16, F16, Q4_1" in str(refusal.value)) == (precision == "auto")
        monkeypatch.undo()


def test_packed_weights_alone_where_a_dense_copy_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, encoding=T.Q4_1)
    monkeypatch.setattr(linear_native, "prompt_gain", lambda: 0.0)
    both, plan = choose_policy("auto", CPU, demand(path))
    assert both.dense
    monkeypatch.setattr("engine.precision.free_bytes", lambda device: plan.total_bytes - 1)
    alone, smaller = choose_policy("auto", CPU, demand(path))
    assert not alone.dense
    assert (smaller.dense_bytes, smaller.packed_bytes) == (0, plan.packed_bytes)


def test_the_kv_cache_of_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path)
    _, plan = choose_policy("float32", CPU, demand(path, max_model_len=65))
    assert plan.kv_cache_bytes == (5 + 1) * 16 * kv_bytes_per_token(demand(path).spec, 4)
    assert plan.total_bytes == plan.weights_bytes + plan.kv_cache_bytes + max(plan.loading_bytes, plan.scratch_bytes)
    larger = replace(plan, scratch_bytes=1 << 40)
    assert larger.without_kv_bytes == plan.weights_bytes + (1 << 40)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("precision", ["auto", "float32", "bfloat16", "folder"])
def test_a_process_takes_what_was_planned(tmp_path: Path, precision: str) -> None:
    """Within a tenth and 12 MiB (interpreter, allocator, tokens): what is held, and the peak."""
    path = tmp_path / "mixed.gguf"
    sizes = {"vocab_size": 8192, "hidden_size": 576, "intermediate_size": 2048, "num_hidden_layers": 4}
    encodings = {"ffn_down": T.Q6_K, "attn_v": T.Q8_0, "token_embd": T.Q8_0}
    model = write_model(path, encoding=T.Q4_1, encodings=encodings, sizes=sizes, heads=9, head_dim=64)
    if precision == "folder":  # safetensors in bfloat16, in shards of a block or so
        path, precision = tmp_path / "folder", "bfloat16"
        model.to(torch.bfloat16).save_pretrained(path, max_shard_size="10MB")
        write_byte_tokenizer(path)
        assert len(list(path.glob("*.safetensors"))) > 2
    command = [sys.executable, "-m", "tests.engine.memory_probe", str(path), precision, str(32 << 20)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    got = json.loads(output.splitlines()[-1])
    assert got["held"] == got["weights_bytes"]
    room, held = 12 << 20, got["weights_bytes"] + got["kv_cache_bytes"]
    assert 0.9 * held - room <= got["loaded"] <= 1.1 * held + room, got
    assert 0.9 * held - room <= got["peak"] <= 1.1 * got["total_bytes"] + room, got
    assert got["decoded"] == []  # every encoding that is to be packed has a packed form
