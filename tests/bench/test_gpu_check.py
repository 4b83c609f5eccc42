"""`make gpu-check` rehearsed on a CPU: every part runs, a failing one stops no other, and figures are what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.gpu.__main__ import _run_here as run_part
from bench.gpu.__main__ import main
from bench.gpu.figures import Figure
from bench.gpu.parity import run_files
from bench.gpu.shapes import SHAPES, RandomTensors, tiny
from engine.models.tensors import NetworkTensors
from engine.quant.matrix import AFFINE_BITS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _quickly() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.engine.interpreter import patch_once_a_launch

        patch_once_a_launch()


@pytest.mark.parametrize("part", ["attention", *SHAPES])
def test_each_measurement_runs(part: str, tmp_path: Path) -> None:
    run_part("card", tmp_path, dry=True)
    run_part(part, tmp_path, dry=True)
    figures = [Figure(**entry) for entry in json.loads((tmp_path / f"{part}.json").read_text())]
    assert all(figure.achieved > 0 for figure in figures)
    measured = {figure.what for figure in figures}
    expected = {"decode_attention", "prefill_attention"} if part == "attention" else {"decode", "prefill"}
    assert expected <= measured
    assert ("served" in measured) == (part == "llama-3.1-8b")


def test_parts_out_of_time_are_named_and_fail_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--only", "qwen3-8b", "--minutes", "0.1"]) == 1
    output = capsys.readouterr().out
    assert output.count("not begun") == 3 + 1  # both parts, and again below the table
    assert "FAILED qwen3-8b" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_check_says_how_to_rehearse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_tests_that_fail_hang_or_break_are_named_and_the_others_counted(tmp_path: Path) -> None:
    texts = {
        "good": "def test_a(): pass\ndef test_b(): pass",
        "bad": "def test_a(): pass\ndef test_b(): assert 1 == 2",
        "broken": "import nothing_of_this_name",
    }
    files = [tmp_path / f"test_{name}.py" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text)
    good, bad, broken = run_files(files, ["-v", "-p", "no:cacheprovider"], interpreted=True, seconds=600)
    assert (good.passed, good.problem) == (2, None)
    assert bad.passed == 1
    assert bad.problem is not None
    assert "test_bad.py::test_b" in bad.problem
    assert broken.problem is not None
    assert "test_broken.py" in broken.problem
    (late,) = run_files(files[:1], [], interpreted=True, seconds=0)
    assert (late.returncode, late.problem) == (None, "test_good.py: 0 passed, not done in time")


@pytest.mark.slow
def test_the_whole_check_can_be_rehearsed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", "--dry-run", "--results", str(tmp_path), "--minutes", "20"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(" ok") == 12
    assert "transformers" in {row["system"] for row in json.loads((tmp_path / "gpu.json").read_text())}


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-3.1-8b", 8.03), ("llama-70b-fp8", 70.6), ("qwen3-30b-a3b", 30.5)]
)
def test_shapes_are_the_true_ones(name: str, billions: float) -> None:
    assert SHAPES[name].spec.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_step_reads_the_experts_that_it_hits_and_no_others() -> None:
    shape, held = SHAPES["qwen3-30b-a3b"], 61 * 10**9
    assert shape.active_parameters / 1e9 == pytest.approx(3.0, rel=0.05)  # 3.3 with the embedding
    one, many = shape.read_bytes(1, held), shape.read_bytes(10_000, held)
    assert one / 2e9 == pytest.approx(3.0, rel=0.1)
    assert many == pytest.approx(held - 151_936 * 2048 * 2, rel=1e-3)
    dense = SHAPES["llama-3.1-8b"]
    assert dense.read_bytes(1, 10**10) == dense.read_bytes(256, 10**10)


@pytest.mark.parametrize("name", list(SHAPES))
def test_random_matrices_are_finite_and_in_their_encoding(name: str) -> None:
    shape = tiny(SHAPES[name])
    layer = RandomTensors(shape).layer(0)
    network = layer.mlp if isinstance(layer.mlp, NetworkTensors) else layer.mlp.experts[0]
    for matrix in (*layer.qkv, layer.attention_output, *network.gate_up, network.down):
        values = matrix.dequantize()
        assert values.shape == matrix.shape
        assert np.isfinite(values).all()
        assert 0 < np.abs(values).mean() < 1
        assert (matrix.encoding in AFFINE_BITS) == (shape.encoding != "bf16")


def test_a_figure_knows_its_share_and_its_rows() -> None:
    figure = Figure("decode", "batch=1", "tokens/s", 150.0, 300.0, 200.0)
    assert figure.share == 0.5
    assert [(row.system, row.median) for row in figure.rows()] == [("tierline", 150), ("roofline", 300), ("goal", 200)]
    assert Figure("load", "x", "s", 1.0).share is None
