"""Which recorded requests another one is like: of the same task, and about the same length of prompt."""

from __future__ import annotations

import math
from typing import Final

from policies.simulation.recorded import Recorded

# Task ("" where the classifier was not asked), and the power of four of the prompt's length.
Stratum = tuple[str, int]

# What a figure of another model rests on: like requests, requests of the task, all that there are, nothing. By how much
# it may be off for that reason alone, as the standard deviation of its logarithm: judgement, on the careful side;
# `make bench-forecast` shows what comes of it.
CLOSE, TASK, ANY, NOTHING = 0, 1, 2, 3
DOUBT: Final = (0.0, 0.15, 0.3, 0.6)


def stratum(request: Recorded) -> Stratum:
    profile, tokens = request.facts.profile, request.facts.prompt_tokens
    return ("" if profile is None else profile.task, int(math.log(max(1, tokens), 4)))


def doublings(output: int) -> int:
    """The power of two of a number of tokens: what counts as about as long."""
    return int(math.log2(max(1, output)))
