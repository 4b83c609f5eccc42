"""A runner without a model, for tests of the control side: real pages and positions, arithmetic in place of attention.

The "KV" of a position is a hash of the KV before it (read through the block table, as attention would) and of its
token; the next token is a hash of the last KV. So a wrong page, a stale page or a page published too early changes the
output, and `expected_tokens` says what is right without any page at all.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from engine.grammar.compiling import Compiler, Grammars, Vocabulary
from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import PrefixCache
from engine.limits import SchedulerConfig
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from engine.spec.speculator import Speculator
from engine.types import AWAITED, CacheGeometry, GrammarFailed, RowResult, StepPlan, StepRow, TokenLogprob, nothing

VOCAB = 1000
EOS = 0
_MASK = (1 << 61) - 1


def _mix(before: int, token: int) -> int:
    x = (before ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _MASK
    return (x ^ (x >> 29)) * 0x94D049BB133111EB & _MASK


def _token(kv: int) -> int:
    return 1 + kv % (VOCAB - 1)  # never EOS


def state(tokens: Sequence[int]) -> int:
    """The KV of the last of these tokens, computed without pages."""
    kv = 0
    for token in tokens:
        kv = _mix(kv, token)
    return kv


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """The continuation of `prompt`, computed without pages."""
    kv = 0
    for token in prompt:
        kv = _mix(kv, token)
    tokens = []
    for _ in range(count):
        tokens.append(_token(kv))
        kv = _mix(kv, tokens[-1])
    return tokens


def fake_logprob(kv: int) -> float:
    return -(kv % 997) / 100


def expected_scores(prompt: Sequence[int]) -> list[tuple[int, float]]:
    """Every token of the prompt but the first, with its log-probability."""
    kv, scores = 0, []
    for token, following in itertools.pairwise(prompt):
        kv = _mix(kv, token)
        scores.append((following, fake_logprob(kv)))
    return scores


class FakeRunner:
    """Implements `engine.types.AheadRunner`. `before_step` may raise, block or look at the plan."""

    def __init__(self, num_blocks: int = 33, block_size: int = 4, max_model_len: int = 128) -> None:
        self.geometry = CacheGeometry(num_blocks, block_size, bytes_per_token=8)
        self.max_model_len = max_model_len
        self.pages: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.before_step: Callable[[StepPlan], None] = lambda plan: None
        self.row_errors: dict[int, str] = {}
        self.steps = 0
        self.tokens_run = 0
        self.finished: list[int] = []
        self.drawn: dict[int, int] = {}  # by request, the tokens of the last step that was drawn

    def execute(self, plan: StepPlan, meanwhile: Callable[[], None] = nothing) -> list[RowResult]:
        flight = self.launch(plan)
        meanwhile()
        flight.draw()
        return flight.results()

    def launch(self, plan: StepPlan) -> FakeFlight:
        self.before_step(plan)
        self.steps += 1
        self.tokens_run += plan.num_tokens
        self.finished += plan.finished
        for page, content in [(to, list(self.pages[source])) for source, to in plan.copies]:
            self.pages[page] = content
        lengths = [len(row.token_ids) for row in plan.rows]
        assert all(length > 0 for length in lengths)
        singles = lengths.count(1)
        assert all(length == 1 for length in lengths[:singles]), "rows with one token come first"
        return FakeFlight(self, plan.rows, [self._states(row) for row in plan.rows])

    def _states(self, row) -> list[int]:
        """Write the KV of a row's tokens to its pages."""
        size = self.geometry.block_size
        assert len(row.block_table) == -(-(row.start + len(row.token_ids)) // size)
        assert 0 not in row.block_table
        tokens = list(row.token_ids)
        first = len(tokens) - row.num_drafts  # the first draft
        assert tokens[:first] == list(row.all_token_ids[row.start : row.start + first])
        assert not row.num_drafts or (row.sample and row.start + first == len(row.all_token_ids))
        if AWAITED in tokens:
            assert tokens == [AWAITED]
            tokens = [self.drawn[row.request_id]]  # there is one: the draw before has begun
        kv = 0
        if row.start:
            last = row.start - 1
            stored = self.pages[row.block_table[last // size]][last % size]
            assert stored is not None, "read of a slot that was never written"
            kv = stored
        states = []
        for position, token in enumerate(tokens, row.start):
            kv = _mix(kv, token)
            self.pages[row.block_table[position // size]][position % size] = kv
            states.append(kv)
        return states

    def choose(self, row, states: Sequence[int]) -> RowResult:
        """What a row yields, by the KV of its tokens."""
        first = len(row.token_ids) - row.num_drafts
        errors = self.row_errors
        if row.request_id in errors:
            return RowResult(row.request_id, error=errors.pop(row.request_id))
        scored: list[TokenLogprob] = []
        if row.score_from is not None:
            for position in range(max(row.score_from, row.start), min(row.start + first, row.num_prompt_tokens - 1)):
                logprob = fake_logprob(states[position - row.start])
                scored.append(TokenLogprob(row.all_token_ids[position + 1], logprob))
        if not row.sample:
            return RowResult(row.request_id, prompt_logprobs=tuple(scored))
        try:
            tokens = _allowed([_token(kv) for kv in states[first - 1 :]], row)
        except GrammarFailed as error:
            return RowResult(row.request_id, error=str(error))
        draws = tuple(
            RowResult(
                draw.request_id,
                tuple(_allowed([_token(states[first - 1])], replace(row, grammar=draw.grammar, num_drafts=0))),
            )
            for draw in row.draws
        )
        drafts = row.token_ids[first:]
        held = next((i for i, draft in enumerate(drafts) if draft != tokens[i]), len(drafts))
        tokens = tokens[: held + 1]
        logprobs: list[TokenLogprob] = []
        if row.params.logprobs is not None:
            for token in tokens:
                top = tuple((token + i, -0.5 - i) for i in range(row.params.logprobs))
                logprobs.append(TokenLogprob(token, -0.5, top))
        return RowResult(row.request_id, tuple(tokens), tuple(logprobs), prompt_logprobs=tuple(scored), draws=draws)


class FakeFlight:
    """`engine.types.Flight`: the KV is written at once, tokens are chosen by `draw`, from what rows say by then."""

    def __init__(self, runner: FakeRunner, rows: Sequence[StepRow], states: Sequence[list[int]]) -> None:
        self._runner = runner
        self._rows, self._states = rows, states
        self._results: list[RowResult] | None = None

    def draw(self) -> None:
        self._results = [self._runner.choose(row, states) for row, states in zip(self._rows, self._states, strict=True)]
        sampled = (result for row, result in zip(self._rows, self._results, strict=True) if row.sample)
        self._runner.drawn = {r.request_id: r.token_ids[-1] if r.token_ids else EOS for r in sampled}

    def results(self) -> list[RowResult]:
        assert self._results is not None, "the draw comes first"
        return self._results


class Clairvoyant:
    """A proposer that knows what the fake model will say, and errs as often as it is told to."""

    waits_for_copies = False
    seconds_per_draft = 0.0

    def __init__(self, error_rate: float = 0.0, seed: int = 0) -> None:
        self._dice = random.Random(seed)
        self._error_rate = error_rate
        self.known: set[int] = set()  # requests that it was not told to forget

    def offers(self, requests: Sequence[Request], most: int) -> list[int]:
        return [self._dice.randint(0, most) if self._error_rate else most for _ in requests]

    def propose(self, counts: Mapping[Request, int]) -> dict[Request, list[int]]:
        drafts = {}
        for request, count in counts.items():
            self.known.add(request.request_id)
            right = expected_tokens(request.token_ids, count)
            drafts[request] = [self._dice.choice([1, 2, t + 1]) if self._errs() else t for t in right]
            if self._errs():
                drafts[request] = drafts[request][: self._dice.randint(0, count)]
        return {request: tokens for request, tokens in drafts.items() if tokens}

    def forget(self, request: Request) -> None:
        self.known.discard(request.request_id)

    def _errs(self) -> bool:
        return self._dice.random() < self._error_rate


def _allowed(tokens: list[int], row) -> list[int]:
    """The tokens themselves, or after each the next number that the row's grammar allows at that position."""
    if row.grammar is None:
        return tokens
    bits = np.zeros((len(tokens), -(-VOCAB // 32)), dtype=np.int32)
    rows = row.grammar.fill(row.token_ids[len(row.token_ids) - row.num_drafts :], bits)
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    chosen = [np.flatnonzero(allowed[i]) for i in range(rows)]
    held = [int(ids[np.searchsorted(ids, token) % len(ids)]) for ids, token in zip(chosen, tokens, strict=False)]
    return held + tokens[rows:]  # behind a draft that is refused, nobody looks


def text_of(token: int) -> str:
    """What a token stands for in grammars: printable ASCII from 1 on, and strange words after that."""
    return chr(31 + token) if token < 96 else f"~{token}~"


def make_compiler() -> Compiler:
    """Compiles grammars over these texts."""
    tokens = [b"<end>", *(text_of(i).encode() for i in range(1, VOCAB))]
    return Compiler(Vocabulary(tokens, [EOS], [EOS], VOCAB))


def make_grammars() -> Grammars:
    """What a core compiles them with."""
    return Grammars(make_compiler)


def make_scheduler(
    runner: FakeRunner,
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_waiting: int = 64,
    prefix_cache: bool = True,
    speculator: Speculator | None = None,
) -> Scheduler:
    cache = PrefixCache(
        BlockPool(runner.geometry.num_blocks),
        runner.geometry.block_size,
        model_digest=b"fake model",
        kv_dtype="float32",
        enabled=prefix_cache,
    )
    config = SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_waiting, runner.max_model_len)
    return Scheduler(config, cache, eos_token_ids=frozenset({EOS}), speculator=speculator)


def step(scheduler: Scheduler, runner: FakeRunner):
    """One turn of the loop with all checks; returns the outputs."""
    plan = scheduler.schedule()
    check_plan(scheduler, plan)
    outputs = scheduler.update(plan, runner.execute(plan))
    scheduler.check()
    return outputs


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """What must hold of every plan: bounds, and no page written that anybody else reads."""
    assert plan.num_tokens <= scheduler.config.max_num_batched_tokens
    assert len(plan.rows) <= scheduler.config.max_num_seqs
    size = scheduler.cache.block_size
    written = [
        row.block_table[page]
        for row in plan.rows
        for page in range(row.start // size, -(-(row.start + len(row.token_ids)) // size))
    ]
    assert len(written) == len(set(written)), "two rows write to one page"
    assert all(scheduler.cache.pool.ref_count(page) == 1 for page in written), "a shared page is written"


def run_all(scheduler: Scheduler, runner: FakeRunner, max_steps: int = 10_000) -> dict[int, list[int]]:
    """Run until idle; returns the generated tokens by request id."""
    tokens: dict[int, list[int]] = {}
    for _ in range(max_steps):
        if not scheduler.has_work:
            pool = scheduler.cache.pool
            assert pool.num_used == 0
            assert pool.num_free + pool.num_cached == pool.total
            return tokens
        for output in step(scheduler, runner):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    raise AssertionError("no end in sight: the scheduler makes no progress")
