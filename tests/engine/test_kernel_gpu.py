"""On a machine with a GPU: the kernel tests again, on the device, and no compilation once an engine is built.

`pytest -m gpu` runs these. They start processes of their own, since this one interprets Triton.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INTERPRETED = ["decode", "prefill", "shapes", "small_ops", "moe", "sample", "packed", "fp8", "kv_fp8"]
INTERPRETED += ["models", "engine"]


def python(*arguments: str, interpret: bool) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TRITON_INTERPRET": "1" if interpret else "0"}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", INTERPRETED)
def test_kernels_on_the_device(name: str) -> None:
    run = python("-m", "pytest", "-q", f"tests/engine/test_kernel_{name}.py", interpret=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


@pytest.mark.gpu
def test_a_built_engine_compiles_nothing_more() -> None:
    run = python("-m", "tests.engine.kernel_gpu_probe", interpret=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == []


@pytest.mark.slow
def test_the_steps_of_the_device_check_run_at_all() -> None:
    """Without a GPU: the same steps, interpreted, so that the check itself is known to work."""
    run = python("-m", "tests.engine.kernel_gpu_probe", interpret=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == []
