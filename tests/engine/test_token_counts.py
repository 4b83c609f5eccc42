"""Penalties on the device: the tables hold what texts have, and kernels change logits as the plain sampler does."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from engine.sampler import Sampler
from engine.sampling.adjust import adjust_row
from engine.sampling.on_device import DeviceSampling
from engine.sampling.token_counts import TokenCounts
from engine.types import SamplingParams, StepRow
from tests.engine.kernel_support import kernel_device

VOCAB = 300


def row_of(text: list[int], num_prompt: int, params: SamplingParams = SamplingParams()) -> StepRow:
    return StepRow(1, text[-1:], len(text) - 1, [1], True, params, text, num_prompt)


def holds(table: TokenCounts, place: int, row: StepRow) -> bool:
    prompt, answer = row.all_token_ids[: row.num_prompt_tokens], row.all_token_ids[row.num_prompt_tokens :]
    counted = {token: count for token, count in enumerate(table.counts[place].tolist()) if count}
    seen = table.in_prompt[place].nonzero().squeeze(1).tolist()
    return counted == Counter(answer) and seen == sorted(set(prompt))


def test_tables_follow_texts_that_grow_come_and_go() -> None:
    """Random histories: more texts than room; some grow, some end, and some are new lists of the same words."""
    dice, table = random.Random(5), TokenCounts(4, VOCAB, kernel_device())
    texts = [(list(range(i, i + 5)), 5) for i in range(3)]
    for _ in range(300):
        kind = dice.random()
        if kind < 0.1 or not texts:
            length = dice.randint(1, 9)
            texts.append(([dice.randrange(VOCAB) for _ in range(length)], length))
        elif kind < 0.15:
            texts.pop(dice.randrange(len(texts)))
        elif kind < 0.25:
            text, num_prompt = dice.choice(texts)
            texts.append((list(text), num_prompt))
        chosen = dice.sample(texts, min(len(texts), dice.randint(1, 4)))
        for text, _ in chosen:
            text.extend(dice.choice([7, 7, dice.randrange(VOCAB)]) for _ in range(dice.choice([0, 1, 1, 3])))
        rows = [row_of(text, num_prompt) for text, num_prompt in chosen]
        places = table.rows_of(rows)
        assert len(set(places)) == len(rows)
        assert all(holds(table, place, row) for place, row in zip(places, rows, strict=True))


def test_a_text_that_lost_its_end_is_counted_anew() -> None:
    table, text = TokenCounts(2, VOCAB, kernel_device()), [1, 2, 3, 3, 3]
    table.rows_of([row_of(text, 2)])
    del text[3:]
    text.append(9)
    del text[2]
    (place,) = table.rows_of([row_of(text, 2)])
    assert holds(table, place, row_of(text, 2))


def test_tokens_outside_the_vocabulary_are_nobodys() -> None:
    table = TokenCounts(1, VOCAB, kernel_device())
    (place,) = table.rows_of([row_of([-1, 5, VOCAB, 6, VOCAB + 3], 3)])
    assert holds(table, place, row_of([5, 6], 1))


PARAMS = [
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(repetition_penalty=0.6, presence_penalty=0.5),
    SamplingParams(frequency_penalty=0.8, presence_penalty=-0.3),
    SamplingParams(logit_bias={3: 2.5, 299: -100.0}, repetition_penalty=1.2),
    SamplingParams(bad_words=((4,), (9, 11)), min_tokens=50, frequency_penalty=-0.4),
    SamplingParams(min_tokens=50, stop_token_ids=frozenset({8})),
    SamplingParams(),
]


@pytest.mark.parametrize("texts", [2, 16], ids=["in parts", "at once"])
def test_logits_change_as_the_plain_sampler_changes_them(texts: int) -> None:
    device, dice, ends = kernel_device(), random.Random(2), frozenset({0, 1})
    logits = torch.randn(len(PARAMS), VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    logits[:, 20:24] = -torch.inf
    rows = [row_of([*(dice.randrange(VOCAB) for _ in range(40)), 3, 3, 9], 25, params) for params in PARAMS]
    expected = logits.clone()
    for values, row in zip(expected, rows, strict=True):
        adjust_row(values, row, ends)
    actual = logits.clone().to(device)
    DeviceSampling(texts, VOCAB, device).adjust(actual, rows, range(len(rows)), ends)
    torch.testing.assert_close(actual.cpu(), expected, atol=1e-5, rtol=1e-6)
    assert not torch.equal(expected, logits)


def test_a_sampler_on_the_device_gives_the_tokens_of_the_plain_one() -> None:
    """Step by step, with texts that grow by what was drawn, log-probabilities, and a row of which nothing is left."""
    device = kernel_device()
    plain, other = Sampler(frozenset({0})), Sampler(frozenset({0}), DeviceSampling(8, VOCAB, device))
    nothing_left = SamplingParams(seed=1, logit_bias=dict.fromkeys(range(VOCAB), -torch.inf))
    params = [SamplingParams(temperature=0.0, repetition_penalty=1.9), nothing_left]
    params += [
        SamplingParams(seed=i, logprobs=1, top_p=0.9, frequency_penalty=0.7, presence_penalty=0.2) for i in (1, 2)
    ]
    texts = [[5, 6, 7 + i] for i in range(len(params))]
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        logits = torch.randn(len(params), VOCAB, generator=generator) * 3
        rows = [row_of(text, 3, p) for text, p in zip(texts, params, strict=True)]
        expected, found = plain.sample(logits, rows), other.sample(logits.to(device), rows)
        assert [(r.token_ids, r.error) for r in found] == [(r.token_ids, r.error) for r in expected]
        assert found[1].error is not None
        for one, two in zip(found, expected, strict=True):
            for mine, its in zip(one.logprobs, two.logprobs, strict=True):
                assert mine.logprob == pytest.approx(its.logprob, abs=1e-5)
                assert mine.rank == its.rank
        for text, result in zip(texts, expected, strict=True):
            text.append(result.token_id or 7)
