"""What the sampler makes of values and parameters that cannot be served: an error of that row, and no more."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.sampler import Sampler
from engine.types import SamplingParams
from tests.engine.sampling_rows import END, VOCAB, logits, row, sample


@pytest.mark.parametrize(
    "params",
    [
        {"bad_words": tuple((token,) for token in range(VOCAB))},
        {"bad_words": tuple((2, token) for token in range(VOCAB))},
        {"logit_bias": dict.fromkeys(range(VOCAB), -math.inf), "temperature": 0.0},
        {"logit_bias": {3: math.inf}},
        {"min_tokens": 9, "stop_token_ids": frozenset(range(VOCAB))},
    ],
    ids=["every word", "every pair", "every bias", "infinite bias", "every stop"],
)
def test_a_row_without_a_token_left_is_its_own_error(params: dict[str, Any]) -> None:
    values = logits(3, VOCAB)
    mates = [row(SamplingParams(seed=1, top_p=0.9, logprobs=2), request_id=1), row(SamplingParams(temperature=0.0))]
    alone = sample(values[[0, 2]], mates)
    first, empty, last = sample(values, [mates[0], row(SamplingParams(**params), answer=(2,)), mates[1]])
    assert (first, last) == (alone[0], alone[1])
    assert empty.token_ids == ()
    assert empty.error is not None
    assert "leave no token" in empty.error


def test_logits_that_are_no_numbers_disturb_no_other_row() -> None:
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.5}, {"top_k": 3}, {"typical_p": 0.5}, {"logprobs": 2, "top_p": 0.9}]
    rows = [row(SamplingParams(seed=i, **kind)) for i, kind in enumerate([*kinds, *kinds])]
    values = logits(len(rows), 300)
    sound = Sampler(END).sample(values, rows)
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = values.clone()
        broken[: len(kinds), 7] = bad
        broken[1] = bad
        assert Sampler(END).sample(broken, rows)[len(kinds) :] == sound[len(kinds) :]


def test_extreme_values() -> None:
    values = logits(1, 200)
    values[0, :20] *= 1e30
    best = int(values.argmax())
    long = tuple(range(20)) * 500

    def chosen(history: tuple[int, ...] = (), **params: Any) -> int:
        (result,) = sample(values, [row(SamplingParams(seed=1, **params), answer=history)])
        assert result.error is None
        assert result.token_id is not None
        return result.token_id

    assert chosen(temperature=1e-5) == best
    assert chosen(temperature=2.0, top_k=10_000) == best
    assert chosen(temperature=2.0, top_p=0.0) == best
    assert chosen(temperature=2.0, logit_bias={50: 100.0}) == best
    assert 0 <= chosen(temperature=1e35) < 200
    values[0, :20] /= 1e30
    assert chosen(logit_bias={50: 100.0}) == 50
    assert chosen(logit_bias={best: -100.0}, temperature=0.0) != best
    assert chosen(long, frequency_penalty=2.0, presence_penalty=2.0) >= 20
    assert chosen(long, repetition_penalty=100.0, temperature=0.1) >= 20
    assert chosen(long, frequency_penalty=-2.0) < 20


@pytest.mark.parametrize("words", [((16,),), ((1, -1),), ((),)])
def test_words_that_do_not_fit_are_that_rows_error(words: tuple[tuple[int, ...], ...]) -> None:
    (result,) = sample(logits(1, VOCAB), [row(SamplingParams(bad_words=words))])
    assert result.error is not None
    assert result.error.startswith("bad_words")


def test_a_bad_bias_is_that_rows_error() -> None:
    values = logits(2, VOCAB)
    bad, good = sample(values, [row(SamplingParams(logit_bias={16: 1.0})), row(SamplingParams(temperature=0.0))])
    assert bad.token_id is None
    assert bad.error == "logit_bias names token 16, the vocabulary has 16"
    assert good.token_id == int(values[1].argmax())


def test_a_token_of_no_probability_is_never_drawn() -> None:
    """The number drawn may be as close to 0 or 1 as a double can be."""
    from engine.sampling.draw import invert

    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]])
    for uniform, token in ((0.0, 1), (0.2999, 1), (0.3001, 3), (1 - 2**-53, 3)):
        assert invert(probs, torch.tensor([[uniform]], dtype=torch.float64)).item() == token
