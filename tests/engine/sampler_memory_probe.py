"""`python -m tests.engine.sampler_memory_probe KIND ROWS VOCAB`: bytes that sampling so many rows takes at most."""

import resource
import sys

import torch

from engine.sampler import Sampler
from engine.types import SamplingParams, StepRow

KINDS = {
    "plain": {},
    "ranked": {"top_p": 0.9},
    "typical": {"typical_p": 0.9},
    "all": {"top_p": 0.9, "typical_p": 0.8, "min_p": 0.001, "repetition_penalty": 1.2, "logprobs": 20},
}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(kind: str, rows: int, vocab: int) -> None:
    torch.set_num_threads(1)
    step = [StepRow(i, [1], 1, [1], True, SamplingParams(**KINDS[kind]), [1, 2, 3], 2) for i in range(rows)]
    Sampler(frozenset()).sample(torch.randn(2, 1000), step[:2])  # what is loaded at the first use
    before = peak()
    Sampler(frozenset()).sample(torch.randn(rows, vocab), step)
    print(peak() - before)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
