"""How a parallel run hands out the test files: the longest first, and those on one running Tierline to one process.

A file is never divided. A run ends with its last file, so long ones must not come last; and `tierline_stack` takes a
process of pytest twelve seconds, so all files that ask for it go to the same one.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).resolve().parent.parent
STACK = "tests/e2e"
# Files that take more than a quarter of a minute, the longest first; the rest follow as they are found.
LONGEST = (
    "tests/gateway/workers/test_workers.py",
    "tests/engine/test_kernel_compile.py",
    "tests/engine/test_kernel_sample.py",
    "tests/engine/test_kernel_engine.py",
    "tests/engine/test_server_process.py",
    "tests/engine/test_parallel.py",
    "tests/engine/test_graphs.py",
    "tests/engine/test_kernel_moe.py",
    "tests/engine/test_kernel_packed.py",
    "tests/engine/test_kernel_decode.py",
    "tests/engine/test_kernel_prefill.py",
    "tests/engine/test_reference_tokens.py",
    "tests/engine/test_memory.py",
    "tests/engine/test_families.py",
    "tests/engine/test_spec_eagle3.py",
    "tests/engine/test_adapter_logits.py",
    "tests/engine/test_adapter_schedules.py",
    "tests/engine/test_kv_sharing.py",
    "tests/bench/test_chaos.py",
    "tests/gateway/workers/test_policy_changes.py",
    "tests/gateway/workers/test_idempotency.py",
    "tests/gateway/workers/test_levels.py",
    "tests/gateway/test_models_quantize.py",
)


@cache
def shares_stack(file: str) -> bool:
    """Whether a test file asks for the session's running Tierline."""
    return file.startswith(STACK) and "tierline_stack" in (ROOT / file).read_text(encoding="utf-8")


def longest_first(items: list[pytest.Item]) -> None:
    """Order the tests of a parallel run in place."""
    places = {file: place for place, file in enumerate(LONGEST)}
    files = {item.nodeid.split("::")[0] for item in items}
    first = {file for file in files if shares_stack(file)}
    items.sort(key=lambda item: -1 if (file := item.nodeid.split("::")[0]) in first else places.get(file, len(places)))


class Scheduler(LoadFileScheduling):
    """As `--dist loadfile`, with all files on the running Tierline as one."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return STACK if shares_stack(file) else file
