"""Threads are configured before torch starts its pool, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine import threads


def run(code: str, **environment: str) -> str:
    """Standard output of `code` in a fresh interpreter without OpenMP settings of its own."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_", "MKL_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean | environment
    )
    return done.stdout.strip()


def test_torch_obeys() -> None:
    code = (
        "from engine import threads; n = threads.configure(1); import os, sys; assert 'torch' not in sys.modules; "
        "import torch; print(n, torch.get_num_threads(), os.environ['OMP_WAIT_POLICY'])"
    )
    assert run(code) == "1 1 passive"


def test_the_default_is_what_the_machine_grants() -> None:
    count = int(run("from engine import threads; print(threads.configure(None))"))
    assert 1 <= count <= min(8, len(os.sched_getaffinity(0)))


def test_the_operators_settings_win() -> None:
    code = "from engine import threads; threads.configure(1); import os; print(os.environ['OMP_WAIT_POLICY'])"
    assert run(code, OMP_WAIT_POLICY="active") == "active"


def test_too_late_is_an_error() -> None:
    import torch  # noqa: F401

    with pytest.raises(RuntimeError, match="before torch"):
        threads.configure(1)


def test_no_threads_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(ValueError, match="at least 1"):
        threads.configure(0)
