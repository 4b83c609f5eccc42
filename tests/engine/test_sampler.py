"""The sampler against naive references, by chi-square, and for what must never change a row: its mates."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from engine.sampler import Sampler
from engine.sampling.draw import likeliest
from engine.sampling.truncate import scale, target_probs
from engine.types import SamplingParams, StepRow
from tests.engine.sampling_rows import END, VOCAB, logits, row, sample


def draws(values: torch.Tensor, params: dict[str, Any], count: int, **history: Any) -> Counter[int]:
    """Tokens drawn from one row's logits `[vocab]` with the seeds 0 to count - 1."""
    found: Counter[int] = Counter()
    for start in range(0, count, 1000):
        rows = [row(SamplingParams(seed=seed, **params), **history) for seed in range(start, min(start + 1000, count))]
        for result in sample(values.expand(len(rows), -1).contiguous(), rows):
            assert result.token_id is not None
            found[result.token_id] += 1
    return found


def test_the_likeliest_is_the_first_of_the_largest() -> None:
    values = torch.randint(0, 9, (40, 333), generator=torch.Generator().manual_seed(0)).float()
    values[3] = -torch.inf
    values[4, 50:] = torch.inf
    want = [next(i for i, value in enumerate(line) if value == max(line)) for line in values.tolist()]
    assert likeliest(values).tolist() == want
    assert likeliest(values.T.contiguous().T).tolist() == want
    assert likeliest(values[2].expand(3, -1)).tolist() == [want[2]] * 3
    values[5, [200, 100]] = torch.nan
    assert likeliest(values)[5] == 100


class EvenSampler(Sampler):
    """Draws by the middles of `count` equal parts of [0, 1) in place of random numbers: request i by the i-th."""

    def __init__(self, count: int) -> None:
        super().__init__(END)
        self._count = count

    def _uniform(self, row: StepRow) -> float:
        return (row.request_id + 0.5) / self._count


def even_draws(values: torch.Tensor, params: dict[str, Any], count: int, **history: Any) -> Counter[int]:
    """Tokens drawn from one row's logits `[vocab]` by `count` evenly spread numbers."""
    rows = [row(SamplingParams(**params), request_id=i, **history) for i in range(count)]
    results = EvenSampler(count).sample(values.expand(count, -1).contiguous(), rows)
    return Counter(result.token_id for result in results if result.token_id is not None)


def naive(
    values: torch.Tensor, params: dict[str, Any], prompt: tuple[int, ...], answer: tuple[int, ...]
) -> list[float]:
    """The distribution by the textbook, one step at a time, in Python floats."""
    p = SamplingParams(**params)
    x = values.tolist()
    for token, bias in p.logit_bias.items():
        x[token] += bias
    if len(answer) < p.min_tokens:
        for token in END | p.stop_token_ids:
            x[token] = -math.inf
    for word in p.bad_words:
        if len(word) <= len(answer) + 1 and (*answer, word[-1])[-len(word) :] == word:
            x[word[-1]] = -math.inf
    for token in {*prompt, *answer}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token, count in Counter(answer).items():
        x[token] -= p.presence_penalty + count * p.frequency_penalty
    x = [value / p.temperature for value in x]
    if p.min_p:
        x = [v if v >= max(x) + math.log(p.min_p) else -math.inf for v in x]
    if p.typical_p < 1:
        total = sum(map(math.exp, x))
        surprise = {i: math.log(total) - v for i, v in enumerate(x) if v > -math.inf}
        entropy = sum(math.exp(-value) * value for value in surprise.values())
        held, mass = set(), 0.0
        for i in sorted(surprise, key=lambda i: abs(surprise[i] - entropy)):
            if mass >= p.typical_p and held:
                break
            held.add(i)
            mass += math.exp(-surprise[i])
        x = [v if i in held else -math.inf for i, v in enumerate(x)]
    ranked = sorted(range(len(x)), key=lambda i: -x[i])
    if p.top_k:
        for i in ranked[p.top_k :]:
            x[i] = -math.inf
    weights = [math.exp(v - max(x)) for v in x]
    probs = [w / sum(weights) for w in weights]
    kept, total = set(), 0.0
    for i in ranked:
        if total >= p.top_p and kept:
            break
        kept.add(i)
        total += probs[i]
    return [probs[i] / sum(probs[j] for j in kept) if i in kept else 0.0 for i in range(len(x))]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 100},
        {"top_p": 0.5},
        {"top_p": 0.93},
        {"top_p": 0.0},
        {"min_p": 0.1},
        {"top_k": 6, "top_p": 0.7, "min_p": 0.05, "temperature": 1.3},
        {"repetition_penalty": 1.8},
        {"presence_penalty": 1.5},
        {"frequency_penalty": -0.7},
        {"logit_bias": {4: 3.0, 9: -100.0}},
        {"min_tokens": 9, "stop_token_ids": frozenset({7, 8})},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4, "top_p": 0.9},
        {"typical_p": 0.2},
        {"typical_p": 0.8},
        {"typical_p": 0.0},
        {"typical_p": 0.9, "min_p": 0.02, "top_k": 7, "top_p": 0.8, "temperature": 1.4},
        {"bad_words": ((4,), (6, 0, 9), (6, 9), (5, 6, 6, 0, 8), (2, 5, 5, 6, 6, 0, 10))},
        {"temperature": 1e30},
    ],
    ids=str,
)
def test_distribution(params: dict[str, Any]) -> None:
    """Numbers spread evenly over [0, 1) draw every token as often as the textbook says, to one draw of a thousand."""
    history = {"prompt": (1, 2, 5), "answer": (5, 6, 6, 0)}
    values, count = logits(VOCAB, seed=11), 1000
    want = naive(values, params, **history)
    found = even_draws(values, params, count, **history)
    assert all(want[token] > 0 for token in found)
    # A token owns one stretch of [0, 1), which holds a whole number of the draws: off by less than one.
    assert all(abs(found[token] - p * count) < 1.01 for token, p in enumerate(want))


@pytest.mark.parametrize(
    "params", [{}, {"typical_p": 0.9, "min_p": 0.02, "top_k": 7, "top_p": 0.8, "temperature": 1.4}], ids=str
)
def test_seeds_are_independent(params: dict[str, Any]) -> None:
    """Chi-square of the draws of 12,000 seeds against the textbook, whole and cut off."""
    history = {"prompt": (1, 2, 5), "answer": (5, 6, 6, 0)}
    values, count = logits(VOCAB, seed=11), 12_000
    want = naive(values, params, **history)
    found = draws(values, params, count, **history)
    assert all(want[token] > 0 for token in found)
    cells = [(found[token], p * count) for token, p in enumerate(want) if p > 0]
    chi_square = sum((observed - expected) ** 2 / expected for observed, expected in cells)
    freedom = len(cells) - 1
    # The 99.99 % quantile (Wilson and Hilferty 1931); seeds are fixed, so this passes or fails the same way always.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-9
    assert chi_square <= limit


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_p": 0.0}, {"typical_p": 0.5, "top_k": 6, "top_p": 0.7, "min_p": 0.05}],
    ids=str,
)
def test_the_whole_distribution(params: dict[str, Any]) -> None:
    """What `target_probs` says is the textbook's distribution, in rows of different kinds at once."""
    values = logits(3, VOCAB, seed=12)
    kinds = [SamplingParams(temperature=0.7), SamplingParams(**params), SamplingParams(top_k=3)]
    probs = target_probs(scale(values, kinds), kinds)
    assert probs[1].tolist() == pytest.approx(naive(values[1], params, (), ()), abs=1e-6)
    assert probs[2].tolist() == pytest.approx(naive(values[2], {"top_k": 3}, (), ()), abs=1e-6)


@pytest.mark.parametrize("mass", [0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_typical_p_keeps_what_transformers_keeps(mass: float) -> None:
    from transformers import TypicalLogitsWarper

    values = logits(8, 500, seed=4, spread=3.0)
    want = TypicalLogitsWarper(mass=mass)(torch.zeros(8, 1, dtype=torch.int64), values.clone())
    found = scale(values, [SamplingParams(typical_p=mass)] * 8)
    assert torch.equal(found.isinf(), want.isinf())


def test_successive_positions_are_independent() -> None:
    """One seed along 8,000 positions: pairs of neighbours fill a 4 x 4 table evenly."""
    params = SamplingParams(seed=5)
    tokens = []
    for start in range(1, 8001, 500):
        rows = [StepRow(n, [0], 0, [1], True, params, [0] * n, 1) for n in range(start, start + 500)]
        tokens += [result.token_id for result in sample(torch.zeros(500, 4), rows)]
    pairs = Counter(zip(tokens[::2], tokens[1::2], strict=True))
    assert sum((pairs[a, b] - 250) ** 2 / 250 for a in range(4) for b in range(4)) < 44  # 15 degrees, 99.99 %


def test_a_wide_nucleus_is_exact() -> None:
    """top_p over a vocabulary where far more tokens than the first guess belong to the nucleus."""
    values, count = logits(2000, seed=3, spread=0.3), 4000
    want = np.array(naive(values, {"top_p": 0.8}, (1,), ()))
    found = even_draws(values, {"top_p": 0.8}, count, prompt=(1,))
    assert len(found) > 1000
    assert all(want[token] > 0 for token in found)
    # Sums along the ranking: wherever it is cut, the likelier tokens have their share, to one draw.
    ranking = np.argsort(-want)
    drawn = np.cumsum([found[int(token)] for token in ranking])
    assert np.abs(drawn - np.cumsum(want[ranking]) * count).max() < 1.01


def test_greedy_is_argmax() -> None:
    values = logits(9, 500)
    results = sample(values, [row(SamplingParams(temperature=0.0), request_id=i) for i in range(9)])
    assert [r.token_id for r in results] == values.argmax(dim=-1).tolist()
    assert [r.request_id for r in results] == list(range(9))
    assert all(r.logprobs == () and r.error is None for r in results)


def test_a_vanishing_temperature_is_greedy() -> None:
    values = logits(1, 500)
    for temperature in (1e-6, 1e-30, 1e-4):
        assert sample(values, [row(SamplingParams(temperature=temperature, seed=1))])[0].token_id == int(
            values.argmax()
        )


def test_greedy_honours_penalties_and_masks() -> None:
    values = torch.tensor([[0.0, 1.0, 2.0, 9.0, 5.0]])
    greedy = {"temperature": 0.0}

    def choose(**params: Any) -> int | None:
        return sample(values, [row(SamplingParams(**greedy, **params), prompt=(0,), answer=(4, 4))])[0].token_id

    assert choose() == 3
    assert choose(min_tokens=3) == 4
    assert choose(min_tokens=2) == 3
    assert choose(min_tokens=3, stop_token_ids=frozenset({4, 99})) == 2
    assert choose(logit_bias={3: -100}) == 4
    assert choose(logit_bias={3: -100}, frequency_penalty=1.6) == 2
    assert choose(logit_bias={3: -100}, presence_penalty=1.6) == 4
    assert choose(logit_bias={3: -100}, repetition_penalty=3.0) == 2


def test_mates_and_order_do_not_matter() -> None:
    """Rows of every kind: each gets alone, and in any order, what it gets together."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1},
        {"seed": 1, "top_k": 4},
        {"seed": 2, "top_p": 0.6},
        {"seed": 3, "min_p": 0.2},
        {"seed": 4, "repetition_penalty": 1.5, "logprobs": 3},
        {"temperature": 0.0, "logprobs": 0},
        {"seed": 6, "logit_bias": {2: 5.0}},
        {"seed": 7, "top_k": 900, "top_p": 0.999},
        {"seed": 8, "min_tokens": 4},
        {"seed": 9, "temperature": 3.0},
        {"seed": 10, "typical_p": 0.3},
        {"seed": 11, "bad_words": ((5,), (2, 7))},
        {"seed": -12345678901234567890},
    ]
    values = logits(len(kinds), 1000, spread=1.0)
    rows = [row(SamplingParams(**kind), request_id=i) for i, kind in enumerate(kinds)]
    together = sample(values, rows)
    for i in range(len(kinds)):
        assert sample(values[i : i + 1], [rows[i]]) == [together[i]]
    order = list(reversed(range(len(kinds))))
    assert sample(values[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_unseeded_requests_differ_and_a_preempted_one_repeats() -> None:
    values = torch.zeros(200, 1000)
    rows = [row(SamplingParams(), request_id=i) for i in range(200)]
    sampler = Sampler(END)
    first = [r.token_id for r in sampler.sample(values, rows)]
    assert len(set(first)) > 150
    assert [r.token_id for r in sampler.sample(values, rows)] == first
    assert [r.token_id for r in Sampler(END).sample(values, rows)] != first


def test_logprobs_are_those_of_the_raw_logits() -> None:
    values = logits(3, 50)
    params = [
        SamplingParams(temperature=0.0, logprobs=4),
        SamplingParams(seed=3, temperature=2.0, top_k=2, repetition_penalty=2.0, logprobs=0),
        SamplingParams(temperature=0.0),
    ]
    results = sample(values, [row(p) for p in params])
    want = torch.log_softmax(values.double(), dim=-1)
    (top,) = results[0].logprobs
    assert [token for token, _ in top.top] == want[0].topk(4).indices.tolist()
    assert [value for _, value in top.top] == pytest.approx(want[0].topk(4).values.tolist(), abs=1e-5)
    assert (top.token_id, top.logprob) == (results[0].token_id, pytest.approx(float(want[0].max()), abs=1e-5))
    (chosen,) = results[1].logprobs
    assert chosen.token_id == results[1].token_id
    assert chosen.top == ()
    assert chosen.logprob == pytest.approx(float(want[1, chosen.token_id]), abs=1e-5)
    assert results[2].logprobs == ()


def test_ranks_count_the_likelier_tokens() -> None:
    values = logits(4, 50)
    results = sample(values, [row(SamplingParams(seed=seed, temperature=2.0, logprobs=1)) for seed in range(4)])
    for i, result in enumerate(results):
        (entry,) = result.logprobs
        assert entry.rank == 1 + int((values[i] > values[i, entry.token_id]).sum())
