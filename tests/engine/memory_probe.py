"""Loads a model in a process of its own and prints, as JSON, the memory that it took beside what its plan said.

    python -m tests.engine.memory_probe MODEL PRECISION KV_CACHE_BYTES

Counts the process's own memory (`RssAnon`), not the file's mapped pages, from the moment when everything is imported.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import torch

from engine.load_runner import load_runner
from engine.loader.source import open_model
from engine.memory import Demand
from engine.precision import choose_policy
from engine.types import SamplingParams, StepPlan, StepRow

LENGTH, SEQS, TOKENS, PAGE = 512, 4, 512, 16


def own_bytes() -> int:
    """Memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


class Peak:
    """The largest `own_bytes` seen, looked at about a thousand times a second."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.bytes = max(self.bytes, own_bytes())

    def end(self) -> int:
        self._stop.set()
        self._thread.join()
        return max(self.bytes, own_bytes())


def main(path: str, precision: str, kv_cache_bytes: int) -> None:
    source = open_model(path).tensors()
    demand = Demand(source.spec, list(source.matrices()), LENGTH, PAGE, SEQS, TOKENS, kv_cache_bytes)
    _, plan = choose_policy(precision, torch.device("cpu"), demand)
    torch.ones(512, 512) @ torch.ones(512, 512)  # torch's own threads and buffers
    before, peak = own_bytes(), Peak()
    runner = load_runner(
        path,
        device="cpu",
        precision=precision,
        max_model_len=LENGTH,
        block_size=PAGE,
        max_num_seqs=SEQS,
        max_num_batched_tokens=TOKENS,
        kv_cache_bytes=kv_cache_bytes,
    )
    runner.attention.kv_cache.fill_(0)  # memory is taken when it is written
    loaded = own_bytes()
    tokens = [2] * (LENGTH - 1)
    row = StepRow(
        0, tokens, 0, range(1, 1 + LENGTH // PAGE), True, SamplingParams(temperature=0.0), tokens, len(tokens)
    )
    runner.execute(StepPlan([row]))
    measured = {"held": runner.decoder.num_bytes, "loaded": loaded - before, "peak": peak.end() - before}
    print(json.dumps(measured | asdict(plan) | {"weights_bytes": plan.weights_bytes, "total_bytes": plan.total_bytes}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
