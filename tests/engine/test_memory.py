"""The memory ledger's arithmetic, and the choice of pages."""

from __future__ import annotations

import pytest

from engine.memory import (
    EngineMemoryError,
    MemoryLedger,
    available_bytes,
    choose_num_blocks,
    kv_bytes_per_token,
    scratch_bytes,
    weight_bytes,
)
from engine.models.spec import ModelSpec, RopeSpec

LLAMA_8B = ModelSpec(
    architecture="llama",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    max_position=131_072,
    norm_eps=1e-5,
    rope=RopeSpec(500_000.0, 128),
    tied_embeddings=False,
)


def test_published_sizes() -> None:
    assert LLAMA_8B.num_parameters == 8_030_261_248  # the model card's 8.03 billion
    assert kv_bytes_per_token(LLAMA_8B, 2) == 131_072
    assert weight_bytes(LLAMA_8B, 16) == 16_060_522_496
    assert weight_bytes(LLAMA_8B, 5) == 16_060_522_496 * 5 // 16


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
    assert scratch_bytes(LLAMA_8B, 1, 9, 2) - few == 8 * 3 * 4 * 128_256


def test_ledger_adds_up() -> None:
    ledger = MemoryLedger(10, 20, 30, 4, 5)
    assert ledger.total_bytes == ledger.as_dict()["total_bytes"] == 60


def test_available_memory_is_plausible() -> None:
    assert 1 << 20 < available_bytes() < 1 << 50


def test_a_spec_that_contradicts_itself_is_refused() -> None:
    import dataclasses

    for change in ({"num_kv_heads": 5}, {"num_layers": 0}, {"rope": RopeSpec(1e4, 130)}, {"rope": RopeSpec(1e4, 63)}):
        with pytest.raises(ValueError):
            dataclasses.replace(LLAMA_8B, **change)
