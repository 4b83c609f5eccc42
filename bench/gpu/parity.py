"""The kernels' own tests, on the card: every file a process of its own, all at once, since compiling takes the time.

Whatever happens to one file, the others are counted; and what has not come to its end in time has passed so far.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.gpu.figures import Figure

_ROOT = Path(__file__).resolve().parents[2]
# Those that need no tools besides pytest, and interpret or run kernels: not those that compile for other cards.
_LEFT_OUT = {"test_kernel_gpu.py", "test_kernel_compile.py"}
# Less than the part of the check may take, so that what was found is still told.
_SECONDS = 135
_OPTIONS = ["--noconftest", "-v", "-m", "not slow", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]


class ParityFailed(Exception):
    """Kernels that do not compute what their references say. The last line counts, those before it are pytest's."""


@dataclass(frozen=True, slots=True)
class FileOutcome:
    """What a file's tests have said. `returncode`: pytest's; None: it was not done in time."""

    name: str
    returncode: int | None
    output: str

    @property
    def passed(self) -> int:
        return len(re.findall(r" PASSED\b", self.output))

    @property
    def failed(self) -> list[str]:
        """Names of tests, once each."""
        return sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+)", self.output, re.MULTILINE)))

    @property
    def problem(self) -> str | None:
        if self.returncode == 0:
            return None
        if self.returncode is None:
            return f"{self.name}: {self.passed} passed, not done in time"
        return f"{self.name}: {self.passed} passed, {', '.join(self.failed) or f'ended with {self.returncode}'}"


def parity(device: torch.device, *, dry: bool) -> list[Figure]:
    """Raises ParityFailed. `dry`: the tests are found and can be imported, no more."""
    files = sorted(path for path in (_ROOT / "tests/engine").glob("test_kernel_*.py") if path.name not in _LEFT_OUT)
    options = [*_OPTIONS, "--collect-only", "-q"] if dry else _OPTIONS
    outcomes = run_files(files, options, interpreted=device.type != "cuda", seconds=_SECONDS)
    problems = [outcome.problem for outcome in outcomes if outcome.problem is not None]
    if problems:
        details = "\n".join(outcome.output[-2000:] for outcome in outcomes if outcome.returncode)
        total = sum(outcome.passed for outcome in outcomes)
        raise ParityFailed(f"{details}\n{total} kernel tests passed; {'; '.join(problems)}")
    figures = [Figure("kernel_test_files", str(device), "passed", len(files))]
    if not dry:
        figures.append(Figure("kernel_tests", str(device), "passed", sum(outcome.passed for outcome in outcomes)))
    return figures


def run_files(files: list[Path], options: list[str], *, interpreted: bool, seconds: float) -> list[FileOutcome]:
    """All files at once, in the order given; after `seconds` those that still run are ended."""
    env = os.environ | {"TRITON_INTERPRET": str(int(interpreted)), "OMP_NUM_THREADS": "1"}
    ends = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number, file in enumerate(files):
            log = Path(folder) / f"{number}.txt"
            with log.open("w") as out:
                command = [sys.executable, "-m", "pytest", *options, str(file)]
                running.append((file, log, subprocess.Popen(command, cwd=_ROOT, env=env, stdout=out, stderr=out)))
        outcomes = []
        for file, log, process in running:
            code: int | None
            try:
                code = process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = None
            outcomes.append(FileOutcome(file.name, code, log.read_text(errors="replace")))
        return outcomes
