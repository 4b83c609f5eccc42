"""Which of the generated answers are given: with `best_of`, the `n` likeliest of each prompt."""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.detokenizer import Delta


def mean_logprob(answer: Delta) -> float:
    """Of the tokens of a whole answer, the end token included. Natural logarithm."""
    return sum(entry.logprob for entry in answer.logprobs) / max(1, len(answer.logprobs))


def likeliest(answers: Sequence[Delta], n: int) -> list[Delta]:
    """The `n` answers with the highest mean log-probability, the likeliest first; all as they came if there are `n`."""
    if len(answers) <= n:
        return list(answers)
    return sorted(answers, key=mean_logprob, reverse=True)[:n]
