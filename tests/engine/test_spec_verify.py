"""Drafts change how fast an answer comes and nothing else: token for token, and in distribution."""

import random

import numpy as np
import pytest
import torch

from engine.sampler import Sampler
from engine.spec.verify import collapse, expand
from engine.types import GrammarFailed, RowResult, SamplingParams, StepRow

VOCAB = 16
PROMPT = (3, 1, 4)
END = frozenset({15})


def row(params, drafts=(), answer=(), request_id=0, grammar=None):
    text = [*PROMPT, *answer]
    return StepRow(
        request_id=request_id,
        token_ids=[text[-1], *drafts],
        start=len(text) - 1,
        block_table=[1],
        sample=True,
        params=params,
        all_token_ids=text,
        num_prompt_tokens=len(PROMPT),
        num_drafts=len(drafts),
        grammar=grammar,
    )


def model(text):
    """float32 logits after a text of this toy: they depend on its length and its last token."""
    return np.random.default_rng([len(text), text[-1]]).normal(0, 2, VOCAB).astype(np.float32)


def logits_of(rows):
    table = {text: model(text) for text in {tuple(r.all_token_ids) for r in rows}}
    return torch.from_numpy(np.stack([table[tuple(r.all_token_ids)] for r in rows]))


def check(sampler, rows):
    """What a runner does with rows: logits at every position, sample, collapse."""
    positions = expand(rows)
    return collapse(rows, sampler.sample(logits_of(positions), positions))


def one_by_one(sampler, params, length, request_id=0, grammar=None):
    answer, logprobs = [], []
    while len(answer) < length:
        (result,) = check(sampler, [row(params, (), answer, request_id, grammar)])
        answer += result.token_ids
        logprobs += result.logprobs
        if grammar is not None:
            grammar.accept(result.token_ids)
    return answer, logprobs


PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(),
    "warm, top_p": SamplingParams(temperature=1.5, top_p=0.8),
    "top_k, min_p": SamplingParams(top_k=5, min_p=0.05),
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.9),
    "greedy penalties": SamplingParams(temperature=0.0, frequency_penalty=1.5),
    "bias": SamplingParams(logit_bias={2: 3.0, 7: -100.0}),
    "min_tokens": SamplingParams(min_tokens=5, stop_token_ids=frozenset({2, 5}), logit_bias={2: 4.0, 15: 4.0}),
    "typical, bad words": SamplingParams(typical_p=0.7, bad_words=((4,), (1, 2), (6, 6, 6))),
    "seeded": SamplingParams(seed=99, temperature=1.2, logprobs=3),
    "logprobs": SamplingParams(temperature=0.0, logprobs=2),
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_any_drafts_give_the_tokens_and_logprobs_of_no_drafts(params):
    dice, sampler = random.Random(5), Sampler(END)
    for request_id in range(12):
        want, want_logprobs = one_by_one(sampler, params, 14, request_id)
        answer, logprobs, steps, held = [], [], 0, 0
        while len(answer) < 8:
            right = want[len(answer) : len(answer) + dice.randint(0, 4)]
            drafts = [t if dice.random() < 0.8 else dice.randrange(VOCAB) for t in right]
            neighbour = row(SamplingParams(), [1, 2], request_id=777)
            result = check(sampler, [row(params, drafts, answer, request_id), neighbour])[0]
            assert 1 <= len(result.token_ids) <= len(drafts) + 1
            agree = next((i for i, (d, t) in enumerate(zip(drafts, right, strict=True)) if d != t), len(drafts))
            assert len(result.token_ids) == agree + 1, "every right draft is taken"
            answer += result.token_ids
            logprobs += result.logprobs
            steps, held = steps + 1, held + agree
        assert answer == want[: len(answer)]
        assert len(answer) == steps + held
        if params.logprobs is not None:
            assert [entry.token_id for entry in logprobs] == answer
        assert [(e.token_id, e.top) for e in logprobs] == [(e.token_id, e.top) for e in want_logprobs[: len(logprobs)]]


def softmax(values):
    powers = np.exp(values - values.max())
    return powers / powers.sum()


def reference(params, text):
    """The distribution of the next token, from the definitions and in float64."""
    values = model(text).astype(np.float64)
    for token, bias in params.logit_bias.items():
        values[token] += bias
    for token in set(text):
        values[token] *= params.repetition_penalty if values[token] < 0 else 1 / params.repetition_penalty
    for token in set(text[len(PROMPT) :]):
        count = text[len(PROMPT) :].count(token)
        values[token] -= params.presence_penalty + params.frequency_penalty * count
    probs = softmax(values / params.temperature)
    order = np.argsort(-probs)
    kept = np.cumsum(probs[order]) - probs[order] < params.top_p
    probs[order[~kept]] = 0
    return probs / probs.sum()


# Penalties and biases are worked out row by row, so they get fewer draws.
@pytest.mark.parametrize(
    ("name", "draws"),
    [
        *((name, 5_000) for name in ("plain", "warm, top_p", "penalties", "bias")),
        *(pytest.param(name, 100_000, marks=pytest.mark.slow) for name in ("plain", "warm, top_p")),
        *(pytest.param(name, 20_000, marks=pytest.mark.slow) for name in ("penalties", "bias")),
    ],
)
def test_two_tokens_checked_together_have_the_distribution_of_two_steps(name, draws):
    """χ² of pairs of tokens, drafts accepted and not: how they came about must not show."""
    params, sampler = PARAMS[name], Sampler(END)
    # Half of the drafts are what a look-up may find, half what a similar model draws with the request's own numbers.
    other = torch.from_numpy(model(PROMPT) + np.random.default_rng(1).normal(0, 0.7, VOCAB).astype(np.float32))
    similar = sampler.sample(other.expand(draws // 2, VOCAB), [row(params, request_id=i) for i in range(draws // 2)])
    drafts = [*(result.token_ids[0] for result in similar), *[5] * (draws // 2)]
    rows = [row(params, [draft], request_id=i) for i, draft in enumerate(drafts)]
    positions = expand(rows)
    results = collapse(rows, sampler.sample(logits_of(positions), positions))
    accepted = sum(len(result.token_ids) == 2 for result in results)
    rest = [row(params, (), r.token_ids, r.request_id) for r in results if len(r.token_ids) == 1]
    second = iter(sampler.sample(logits_of(rest), rest))
    counts = np.zeros((VOCAB, VOCAB))
    for result in results:
        pair = result.token_ids if len(result.token_ids) == 2 else (*result.token_ids, *next(second).token_ids)
        counts[pair] += 1
    first = reference(params, list(PROMPT))
    expected = draws * np.stack([first[t] * reference(params, [*PROMPT, t]) for t in range(VOCAB)])
    assert counts[expected == 0].sum() == 0
    assert draws * 0.05 < accepted < draws * 0.95
    cells = expected >= 5
    rest_expected, rest_counts = expected[~cells].sum(), counts[~cells].sum()
    chi2 = ((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    if rest_expected > 5:
        chi2 += (rest_counts - rest_expected) ** 2 / rest_expected
    freedom = cells.sum() - (rest_expected <= 5)
    # Far beyond any chance: a mean of `freedom` and a standard deviation of its root times 1.41.
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom), f"{chi2:.1f} with {freedom} degrees of freedom"


class OneAfterAnother:
    """A grammar that allows two tokens, each by what came before it; counts how often it is asked."""

    def __init__(self):
        self.last, self.asked, self.fails = 0, 0, False

    def allowed(self, last):
        return {(last * 5 + 1) % VOCAB, (last * 3 + 2) % VOCAB}

    def fill(self, drafts, out):
        self.asked += 1
        if self.fails:
            raise GrammarFailed("there is no way on")
        last = self.last
        for place in range(len(drafts) + 1):
            out[place] = 0
            for token in self.allowed(last):
                out[place, 0] |= 1 << token
            if place == len(drafts) or drafts[place] not in self.allowed(last):
                return place + 1
            last = drafts[place]
        raise AssertionError

    def accept(self, token_ids):
        for token in token_ids:
            assert token in self.allowed(self.last)
            self.last = token


@pytest.mark.parametrize("name", ["greedy", "plain", "penalties"])
def test_a_grammar_holds_inside_a_run_and_is_asked_once_for_it(name):
    dice, sampler, params = random.Random(2), Sampler(END), PARAMS[name]
    for request_id in range(10):
        want, _ = one_by_one(sampler, params, 16, request_id, OneAfterAnother())
        grammar, answer, steps = OneAfterAnother(), [], 0
        while len(answer) < 10:
            right = want[len(answer) : len(answer) + 4]
            drafts = [t if dice.random() < 0.8 else dice.randrange(VOCAB) for t in right]
            (result,) = check(sampler, [row(params, drafts, answer, request_id, grammar)])
            grammar.accept(result.token_ids)
            answer += result.token_ids
            steps += 1
        assert answer == want[: len(answer)]
        assert grammar.asked == steps


def test_a_grammar_with_no_way_on_ends_its_row_alone():
    grammar = OneAfterAnother()
    grammar.fails = True
    failed, fine = check(
        Sampler(END), [row(PARAMS["greedy"], [1, 2], grammar=grammar), row(PARAMS["greedy"], [1, 2], request_id=1)]
    )
    assert "no way on" in failed.error
    assert fine.error is None
    assert fine.token_ids


def test_an_error_counts_only_where_the_answer_gets_to():
    rows = [row(PARAMS["greedy"], [5, 6])]

    def outcome(*own):
        return collapse(rows, own)[0]

    five, six, bad = RowResult(0, (5,)), RowResult(0, (6,)), RowResult(0, error="not finite")
    assert outcome(six, bad, bad) == RowResult(0, (6,))
    assert outcome(bad, six, six).error == "not finite"
    assert outcome(five, bad, six).error == "not finite"
    assert outcome(five, six, bad).error == "not finite"
    assert outcome(five, six, six) == RowResult(0, (5, 6, 6))


def test_rows_without_drafts_are_left_as_they_are():
    rows = [row(PARAMS["plain"]), row(PARAMS["greedy"], request_id=1)]
    assert all(a is b for a, b in zip(expand(rows), rows, strict=True))
