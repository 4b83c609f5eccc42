"""Messages that were written for settings, for somebody who wrote options."""

from __future__ import annotations

import pytest

from engine.__main__ import parse_arguments
from engine.flags import with_flags
from engine.limits import SchedulerConfig
from engine.memory import EngineMemoryError, choose_num_blocks


def test_bounds_are_named_as_options() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens") as refused:
        SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=8)
    assert with_flags(str(refused.value)).startswith(
        "--max-num-batched-tokens (8) must be at least --max-num-seqs (64)"
    )


def test_advice_names_options_that_exist() -> None:
    sizes = {"bytes_per_token": 100, "block_size": 16, "max_model_len": 4096, "max_num_seqs": 4, "budget_bytes": 1000}
    with pytest.raises(EngineMemoryError) as refused:
        choose_num_blocks(**sizes, free_bytes=1000, on_gpu=False)
    told = with_flags(str(refused.value))
    assert "lower --max-model-len" in told
    assert "raise --kv-cache-bytes" in told
    for option in ("--max-model-len", "--kv-cache-bytes"):
        parse_arguments(["--model", "x", option, "128"])


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("or precision auto on a CPU", "or --precision auto on a CPU"),
        ("device 'tpu' is not supported: use cpu or cuda", "--device 'tpu' is not supported: use cpu or cuda"),
        ("device cuda: torch finds none", "--device cuda: torch finds none"),
        ("the precision of a device", "the precision of a device"),
        ("/models/block_size.gguf: no such file", "/models/block_size.gguf: no such file"),
        ("'max_model_len' of config.json", "'max_model_len' of config.json"),
        ("raise --kv-cache-bytes", "raise --kv-cache-bytes"),
    ],
)
def test_only_settings_are_renamed(message: str, told: str) -> None:
    assert with_flags(message) == told
