"""Compiled without a GPU, every kernel fits the chip, keeps to its registers and uses the tensor cores.

The compiler runs in processes of their own, since this one interprets Triton.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.kernels.product_launches import product_launches
from engine.kernels.specialisations import MODEL_SHAPES, model_launches
from engine.messages import Stats
from engine.metrics import EngineMetrics

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this Python at the project's root with Triton's compiler on."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def compiled(*arguments: str) -> list[dict[str, Any]]:
    run = python("-m", "engine.kernels.compile", "--json", *arguments)
    assert run.returncode in (0, 1), run.stderr
    resources: list[dict[str, Any]] = json.loads(run.stdout)
    assert (run.returncode == 0) == all(not one["spill_bytes"] for one in resources)
    return resources


def check(resources: list[dict[str, Any]], archs: set[int]) -> None:
    shared_limit = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 86: 99 * 1024}
    roles = {"decode", "decode_combine", "decode_direct", "prefill", "prefill_short"}
    roles |= {"kv_write", "rotary", "rms_norm", "add_rms_norm", "gated"}
    roles |= {"sample_maximum", "sample_weigh", "sample_compact", "sample_draw", "sample_penalise"}
    experts = {"route", "combine"}
    experts |= {f"{role}_{rows}" for role in ("permute", "experts_up", "experts_down") for rows in (16, 64, 128)}
    seen = {one["kernel"] for one in resources}
    assert seen == (roles | experts if "route" in seen else roles)
    assert {one["arch"] for one in resources} == archs
    for one in resources:
        assert one["shared_bytes"] <= shared_limit[one["arch"]], one
        # For sm_86 the assembler trades two registers of one kernel for occupancy.
        assert one["spill_bytes"] <= (8 if one["arch"] == 86 else 0), one
        assert 0 < one["registers"] <= 255, one
        if one["uses_tensor_cores"]:
            assert one["mma"] + one["wgmma"] > 0, one
            # K and V travel to shared memory while the tile before is computed, in spite of the block table.
            assert one["async_copies"] > 0, one
        if one["kernel"] == "prefill" and one["arch"] == 90:
            assert one["wgmma"] > 0, one  # tall tiles use Hopper's warp-group instructions


def test_every_kernel_is_compiled_by_some_launch() -> None:
    """None in the folder that reports and assertions have not heard of."""
    parts = [part for shape in MODEL_SHAPES for part in model_launches(shape, 90)]
    parts += [part for _, part in product_launches(90)]
    folder = ROOT / "engine" / "kernels"
    sources = [file.read_text() for file in folder.glob("*.py")]
    defined = {name for text in sources for name in re.findall(r"^@triton\.jit.*\ndef (\w+_kernel)\(", text, re.M)}
    assert {part.launch.kernel.fn.__name__ for part in parts} == defined


def test_kernels_of_a_common_model() -> None:
    check(compiled("--arch", "80", "--arch", "90", "--model", "llama-3.1-8b"), {80, 90})


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_the_products_of_experts(model: str) -> None:
    """Floats and packed weights: no spills, tensor cores, weights on their way while the tile before is multiplied."""
    roles = ["experts_up_16", "experts_down_128", "route", "permute_16", "combine"]
    resources = compiled("--arch", "80", "--arch", "90", "--model", model, *_of(roles))
    assert len(resources) == 2 * len(roles)
    for one in resources:
        assert one["spill_bytes"] == 0, one
        assert one["shared_bytes"] <= 99 * 1024, one
        if not one["uses_tensor_cores"]:
            continue
        assert one["async_copies"] > 0, one
        tall = one["kernel"] == "experts_down_128" and one["arch"] == 90
        assert one["wgmma" if tall else "mma"] > 0, one


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 90, 100])
def test_kernels_of_every_model(arch: int) -> None:
    check(compiled("--arch", str(arch)), {arch})


def check_products(resources: list[dict[str, Any]], arch: int) -> None:
    limit = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}[arch]
    assert resources
    for one in resources:
        assert one["arch"] == arch
        assert one["shared_bytes"] <= limit, one
        assert one["spill_bytes"] == 0, one
        if one["uses_tensor_cores"]:
            # Weights are on their way while those before them are multiplied.
            assert one["async_copies"] > 0, one
            # A decode tile is as low as the instructions of a single warp.
            assert one["wgmma" if arch >= 90 and one["kernel"] != "decode" else "mma"] > 0, one


# A table of the rest is in the slow tests; each kernel is in one of these.
@pytest.mark.parametrize(
    ("arch", "roles"),
    [
        (80, ["packed_gemm_16", "add_splits", "decode_weight"]),
        (90, ["packed_gemm_64", "fp8_gemm_16", "add_rms_norm_fp8", "kv_write_fp8", "decode", "prefill"]),
    ],
)
def test_products_with_quantised_weights_and_attention_over_quantised_keys(arch: int, roles: list[str]) -> None:
    resources = compiled("--products", "--arch", str(arch), *_of(roles))
    check_products(resources, arch)
    assert {one["kernel"] for one in resources} == set(roles)


def _of(roles: list[str]) -> list[str]:
    return [word for role in roles for word in ("--role", role)]


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90, 100])
def test_products_with_quantised_weights(arch: int) -> None:
    resources = compiled("--products", "--arch", str(arch))
    check_products(resources, arch)
    roles = {one["kernel"].rstrip("_0123456789") for one in resources}
    fp8 = {"fp8_gemm", "fp8_rows", "add_rms_norm_fp", "kv_write_fp", "decode", "decode_combine", "prefill"}
    fp8 = fp8 if arch >= 89 else set()
    assert roles == {"packed_gemm", "packed_gemm_split", "add_splits", "decode_weight"} | fp8


@pytest.mark.slow
def test_float32_kernels_fit_too() -> None:
    for one in compiled("--dtype", "float32", "--arch", "80", "--arch", "90"):
        assert one["shared_bytes"] <= 163 * 1024, one
        assert one["spill_bytes"] == 0, one


def test_serving_compiles_what_was_compiled_ahead_and_nothing_after_warm_up(tmp_path: Path) -> None:
    run = python("-m", "tests.engine.kernel_jit_probe", TRITON_CACHE_DIR=str(tmp_path))
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert seen["ahead"] == 15, "ten of a step, five of a draw"
    assert seen["differing"] == [], "these would be compiled again when serving"
    assert seen["late"] == 0, "steps of other sizes compile kernels again"
    # The monitor works: a new head size is counted, named and logged; after `uninstall` nothing is.
    assert seen["noticed"] == ["rms_norm_kernel"]
    assert "compiled after warm-up" in run.stderr
    assert seen["counted"] == seen["passed_on"] - 1, "the listener before it heard all, the monitor all but the last"


def test_interpreted_kernels_cannot_be_compiled() -> None:
    run = python("-m", "engine.kernels.compile", "--model", "smollm2-135m", TRITON_INTERPRET="1")
    assert run.returncode == 2
    assert "unset TRITON_INTERPRET" in run.stderr


def test_the_engine_imports_without_triton() -> None:
    """On a machine without Triton (or without a GPU) nothing of it is loaded until a CUDA device is chosen."""
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import engine.runner, engine.layers.attention, engine.layers.ops, engine.kernels, engine.kernels.jit_monitor"
    )
    run = python("-c", script)
    assert run.returncode == 0, run.stderr


def test_late_compilations_reach_the_metrics() -> None:
    metrics = EngineMetrics("tiny")
    metrics.on_step(Stats(late_kernels=2), None)
    assert 'tierline_engine_late_kernels_total{model="tiny"} 2.0' in metrics.render().decode()
