"""Sampling takes no more memory than is planned for it."""

import subprocess
import sys

import pytest

from engine.limits import DRAWN_AT_ONCE

ROWS, VOCAB = 40, 100_000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "ranked", "typical", "all"])
def test_sampling_keeps_to_its_plan(kind):
    """A whole step of rows that ask for the same; the plan is that of `engine.memory.scratch_bytes`."""
    command = [sys.executable, "-m", "tests.engine.sampler_memory_probe", kind, str(ROWS), str(VOCAB)]
    taken = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    planned = (2 * ROWS + 9 * DRAWN_AT_ONCE) * VOCAB * 4
    assert 0.2 * planned < taken <= planned
