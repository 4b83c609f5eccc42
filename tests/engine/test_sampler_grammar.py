"""Grammars in the sampler: only what they allow is chosen, by the same distribution as without them, row by row."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import torch

from engine.grammar import lark
from engine.grammar.compiling import Compiler, Vocabulary
from engine.grammar.lark import Grammar
from engine.grammar.state import GrammarState
from engine.sampler import Sampler
from engine.sampling.grammar import unpack
from engine.spec.verify import collapse, expand
from engine.types import RowResult, SamplingParams, StepRow

TOKENS = [b"<end>", *(b"%c" % i for i in b"abcdefghij"), b"ab", b"ba", b"{", b"}"]
END = 0
VOCAB = len(TOKENS) + 1  # one without a text
A, B, AB, BA = (TOKENS.index(text) for text in (b"a", b"b", b"ab", b"ba"))
COMPILER = Compiler(Vocabulary(TOKENS, [END], [END], VOCAB))


def grammar(pattern: str, *tokens: int) -> GrammarState:
    state = COMPILER.compile(Grammar(("start: " + lark.regex(pattern),)).text())
    state.accept(tokens)
    return state


def row(state: GrammarState | None, request_id: int = 0, **params: object) -> StepRow:
    fields = {"temperature": 0.0} | params
    answer = [A, A]
    return StepRow(request_id, [A], 3, [1], True, SamplingParams(**fields), [B, B, *answer], 2, grammar=state)  # type: ignore[arg-type]


def sample(logits: torch.Tensor, rows: list[StepRow]) -> list[RowResult]:
    before = logits.clone()
    results = Sampler(frozenset({END})).sample(logits, rows)
    assert torch.equal(logits, before)
    return results


def normal(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def test_bits_are_tokens_in_the_order_of_the_contract() -> None:
    generator = np.random.default_rng(0)
    bits = generator.integers(-(2**31), 2**31, (5, 3), dtype=np.int64).astype(np.int32)
    expected = [[bool((int(word) & 0xFFFF_FFFF) >> bit & 1) for word in line for bit in range(32)] for line in bits]
    assert unpack(torch.from_numpy(bits), 90).tolist() == [line[:90] for line in expected]


def test_the_likeliest_allowed_token_is_chosen_and_other_rows_are_not_touched() -> None:
    logits = normal(3)
    results = sample(logits, [row(None, 0), row(grammar("[ab]+"), 1), row(grammar("c"), 2)])
    assert results[0].token_id == int(logits[0].argmax())
    assert results[1].token_id == max((A, B, AB, BA), key=lambda t: float(logits[1, t]))
    assert results[2].token_id == TOKENS.index(b"c")


def test_draws_follow_the_distribution_over_the_allowed_tokens() -> None:
    logits = normal(1, seed=3)
    allowed = [END, A, B, AB, BA]
    expected = torch.softmax(logits[0, allowed].double() / 0.8, 0)
    count = 4000
    state = grammar("[ab]+", A)
    rows = [row(state, temperature=0.8, seed=seed) for seed in range(count)]
    drawn = Counter(r.token_id for r in sample(logits.expand(count, VOCAB).contiguous(), rows))
    assert set(drawn) <= set(allowed)
    chi_square = sum((drawn[t] - count * float(p)) ** 2 / (count * float(p)) for t, p in zip(allowed, expected))  # noqa: B905
    assert chi_square < 23.5, "4 degrees of freedom, p = 1e-4"


def test_truncation_counts_what_is_allowed_only() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, TOKENS.index(b"c")] = 9.0
    logits[0, [A, B]] = torch.tensor([1.0, 0.5])
    for seed in range(20):
        [result] = sample(logits, [row(grammar("[abd]+"), temperature=1.0, top_k=2, seed=seed)])
        assert result.token_id in (A, B)


def test_penalties_come_before_and_log_probabilities_stay_raw() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, A] = 1.0  # the answer is "aa" so far
    [result] = sample(logits, [row(grammar("[ab]+"), presence_penalty=1.5, logprobs=2)])
    assert result.token_id in (B, AB, BA)
    raw = torch.log_softmax(logits[0], 0)
    assert abs(result.logprobs[0].logprob - float(raw[result.token_id])) < 1e-6
    assert result.logprobs[0].top[0][0] == A


def test_a_grammar_that_allows_only_the_end_overrules_min_tokens_and_bad_words() -> None:
    logits = normal(1)
    state = grammar("ab", A, B)
    for params in ({"min_tokens": 10}, {"bad_words": ((END,),)}):
        [result] = sample(logits, [row(state, **params)])
        assert result.token_id == END
    [result] = sample(logits, [row(grammar("ab*", A), min_tokens=10)])
    assert result.token_id == B, "where there is another way, the end is still banned"


def test_positions_behind_drafts_are_masked_as_in_steps_of_their_own() -> None:
    drafts = [B, AB, TOKENS.index(b"c"), A]  # the third is refused
    logits = normal(5, seed=4)
    one = row(grammar("[ab]*"), seed=5, temperature=1.0)
    drafted = replace(one, token_ids=[A, *drafts], num_drafts=4)
    together = sample(logits, expand([drafted]))
    for held in range(3):
        state = grammar("[ab]*", *drafts[:held])
        alone = replace(one, grammar=state, all_token_ids=[*one.all_token_ids, *drafts[:held]])
        assert together[held] == sample(logits[held : held + 1], [alone])[0]
    [result] = collapse([drafted], together)
    assert result.error is None
    assert 1 <= len(result.token_ids) <= 3


def test_a_grammar_that_fails_ends_its_own_row() -> None:
    broken = grammar("ab")
    broken._matcher.consume_token(B)  # an error of the library that it never leaves
    logits = normal(2)
    failed, fine = sample(logits, [row(broken, 0), row(grammar("[ab]+"), 1)])
    assert failed.error is not None
    assert "grammar" in failed.error
    assert fine.error is None
    assert fine.token_id in (A, B, AB, BA)
