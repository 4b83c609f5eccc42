"""`tierline models plan`: the table, JSON, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gateway.commands import tierline


def test_a_public_model_by_name() -> None:
    fits = tierline("models", "plan", "llama-3.1-8b", "--gpu-memory", "80GB", "--context", "4k", "--parallel", "64")
    assert fits.returncode == 0, fits.stderr
    lines = fits.stdout.splitlines()
    assert lines[0] == "llama-3.1-8b: 8.03 billion parameters"
    for row in ("weights as stored, BF16", "16.06 GB"), ("KV cache of a token", "131,072 bytes"):
        assert any(all(part in line for part in row) for line in lines), row
    assert any(line.startswith("64 requests of 4,096 tokens") and "do not fit" not in line for line in lines)
    too_long = tierline(
        "models", "plan", "llama-3.1-8b", "--gpu-memory", "80GB", "--context", "32k", "--parallel", "64"
    )
    assert too_long.returncode == 1
    assert "do not fit" in too_long.stdout


def test_json_has_the_ledger() -> None:
    arguments = ("models", "plan", "llama-3.1-70b", "--gpu-memory", "80GB", "--quantization", "int4", "--json")
    planned = tierline(*arguments)
    assert planned.returncode == 0  # packed it fits, decoded it would not
    ledger = json.loads(planned.stdout)
    assert ledger["precision"]["auto"]["fits"]
    assert not ledger["precision"]["bfloat16"]["fits"]
    assert ledger["kv_bytes_per_token"] == 327_680


def test_several_gpus_and_short_keys_and_values() -> None:
    arguments = ("models", "plan", "llama-3.1-70b", "--gpu-memory", "80GB", "--context", "8k", "--parallel", "8")
    assert tierline(*arguments).returncode == 1
    four = tierline(*arguments, "--tensor-parallel", "4", "--kv-dtype", "fp8")
    assert four.returncode == 0, four.stderr
    assert "on the fullest of 4 GPUs of 80.00 GB" in four.stdout
    assert any(line.startswith("KV cache of a token") and "168,960 bytes" in line for line in four.stdout.splitlines())


def test_a_pulled_model(tmp_path: Path, smollm2_path: Path) -> None:
    plan = tierline("models", "plan", str(smollm2_path), "--gpu-memory", "1GiB", "--context", "2k", "--parallel", "4")
    assert plan.returncode == 0, plan.stderr
    assert "weights as stored, Q4_1" in plan.stdout


def test_what_cannot_be_planned(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (("no-such-model", "--gpu-memory", "80GB"), "neither a file nor"),
        (("llama-3.1-8b", "--gpu-memory", "lots"), "80GB"),
        (("llama-2-7b", "--gpu-memory", "80GB", "--context", "32k"), "outside 1 to 4096"),
        (("llama-2-7b", "--gpu-memory", "80GB", "--quantization", "int3"), "int4"),
        (("llama-2-7b", "--gpu-memory", "80GB", "--kv-dtype", "int8"), "fp8"),
        (("llama-2-7b", "--gpu-memory", "80GB", "--tensor-parallel", "3"), "use 1, 2, 4, 8, 16, 32"),
        (("llama-2-7b", "--gpu-memory", "80GB", "--tensor-parallel", "0"), "1 to 64 processes"),
    ):
        refused = tierline("models", "plan", *arguments)
        assert refused.returncode == 2
        assert words in capfd.readouterr().err  # the engine's process says it itself
