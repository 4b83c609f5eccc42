"""Requests with a grammar in scheduler and core: where they wait, what ends them, and that nobody else feels it."""

from __future__ import annotations

import random
import re

import pytest

from engine.grammar import lark
from engine.grammar.anteroom import Anteroom
from engine.grammar.lark import Grammar
from engine.limits import QueueFull
from engine.messages import Abort, Add, NewRequest
from engine.spec.speculator import Speculator
from engine.types import FinishReason, SamplingParams
from tests.engine.fakes import (
    EOS,
    FakeRunner,
    expected_tokens,
    make_compiler,
    make_grammars,
    make_scheduler,
    run_all,
    step,
    text_of,
)
from tests.engine.test_core import Peer, outputs


def pattern(text: str) -> str:
    return Grammar(("start: " + lark.regex(text),)).text()


def new(request_id, prompt, grammar=None, max_tokens=40, **params):
    return NewRequest(request_id, list(prompt), SamplingParams(max_tokens=max_tokens, **params), grammar=grammar)


def said(tokens) -> str:
    return "".join(text_of(token) for token in tokens if token != EOS)


def until_finished(peer, request_ids):
    """Messages until all of these requests have ended."""
    open_ids = set(request_ids)
    messages = []
    while open_ids:
        messages.append(peer.receive())
        open_ids -= {o.request_id for o in outputs(messages[-1:]) if o.finish_reason}
    return messages


def tokens_of(messages) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for output in outputs(messages):
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


@pytest.fixture
def compiled():
    """The state before the first token, by pattern."""
    compiler = make_compiler()
    return lambda text: compiler.compile(pattern(text))


@pytest.fixture
def make_peer():
    peers = []

    def make(runner, **config):
        peers.append(Peer(runner, **config))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


def test_an_answer_follows_its_grammar_and_ends_when_that_is_complete(compiled) -> None:
    runner = FakeRunner()
    scheduler = make_scheduler(runner)
    scheduler.add([new(1, range(1, 9)), new(2, range(1, 9))], {2: compiled("[0-9]{3}-[a-f]{2}")})
    seen = {1: [], 2: []}
    while scheduler.has_work:
        for output in step(scheduler, runner):
            seen[output.request_id].append(output)
    text = said([t for output in seen[2] for t in output.token_ids])
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}", text)
    assert seen[2][-1].finish_reason is FinishReason.STOP
    assert seen[2][-1].stop_token_id is None, "its last token is part of the answer"
    assert [t for output in seen[1] for t in output.token_ids] == expected_tokens(range(1, 9), 40)


def test_an_end_token_ends_an_open_grammar_and_is_named(compiled) -> None:
    runner = FakeRunner()
    scheduler = make_scheduler(runner)
    state = compiled("a*")
    scheduler.add([new(1, [5, 6])], {1: state})
    seen = []
    while scheduler.has_work:
        seen += step(scheduler, runner)
    tokens = [t for output in seen for t in output.token_ids]
    assert set(tokens) <= {EOS, 97 - 31}
    assert (tokens[-1] == EOS) == (seen[-1].finish_reason is FinishReason.STOP)
    if tokens[-1] == EOS:
        assert seen[-1].stop_token_id == EOS


def test_the_token_limit_in_the_middle_is_length(compiled) -> None:
    runner = FakeRunner()
    scheduler = make_scheduler(runner)
    scheduler.add([new(1, [5, 6], max_tokens=4)], {1: compiled("[0-9]{9}")})
    seen = []
    while scheduler.has_work:
        seen += step(scheduler, runner)
    assert seen[-1].finish_reason is FinishReason.LENGTH
    assert re.fullmatch("[0-9]{4}", said([t for output in seen for t in output.token_ids]))


def test_ignore_eos_does_not_outlast_the_grammar(compiled) -> None:
    runner = FakeRunner()
    scheduler = make_scheduler(runner)
    scheduler.add([new(1, [5, 6], ignore_eos=True)], {1: compiled("ab?")})
    assert said(run_all(scheduler, runner)[1]) in ("a", "ab")


@pytest.mark.parametrize("pages", [65, 13])
def test_preempted_answers_go_on_where_they_were(compiled, pages) -> None:
    shape = "([0-9]{4}[a-z]){6}"

    def answers(num_blocks, max_num_seqs):
        runner = FakeRunner(num_blocks=num_blocks)
        scheduler = make_scheduler(runner, max_num_seqs=max_num_seqs)
        requests = [new(i, range(10 * i, 10 * i + 6)) for i in range(1, 5)]
        scheduler.add(requests, {r.request_id: compiled(shape) for r in requests})
        return run_all(scheduler, runner), scheduler.stats.preemptions

    alone, _ = answers(65, 1)
    together, preemptions = answers(pages, 4)
    assert together == alone
    assert all(re.fullmatch(shape, said(tokens)) for tokens in together.values())
    assert (preemptions > 0) == (pages == 13)


class Oracle:
    """Proposes what the answers will be, and errs now and then."""

    waits_for_copies = False
    seconds_per_draft = 0.0

    def __init__(self, answers, error_rate) -> None:
        self._answers = answers
        self._error_rate = error_rate
        self._dice = random.Random(0)

    def offers(self, requests, most):
        return [most for _ in requests]

    def propose(self, counts):
        drafts = {}
        for request, count in counts.items():
            ahead = self._answers[request.request_id][request.num_generated_tokens :][:count]
            right = [*ahead, EOS, EOS, EOS, EOS][:count]  # past the end, too
            drafts[request] = [5 if self._dice.random() < self._error_rate else token for token in right]
        return drafts

    def forget(self, request):
        pass


@pytest.mark.parametrize("error_rate", [0.0, 0.4])
def test_drafts_change_nothing_but_the_number_of_steps(compiled, error_rate) -> None:
    shapes = {1: "([0-9]{4}[a-z]){3}", 2: "(ab|cd|[0-9])*x", 3: '[^"]{20}'}

    def answers(speculator):
        runner = FakeRunner(num_blocks=65)
        scheduler = make_scheduler(runner, max_num_batched_tokens=32, speculator=speculator)
        requests = [new(i, range(10 * i, 10 * i + 6)) for i in shapes]
        scheduler.add(requests, {i: compiled(shape) for i, shape in shapes.items()})
        return run_all(scheduler, runner), runner.steps

    plain, steps = answers(None)
    drafted, fewer = answers(Speculator(Oracle(plain, error_rate), 4, adaptive=False))
    assert drafted == plain
    assert fewer < steps
    assert all(re.fullmatch(shapes[i], said(tokens)) or len(tokens) == 40 for i, tokens in plain.items())


def test_a_token_that_the_grammar_refuses_ends_the_request(compiled) -> None:
    runner = FakeRunner()
    scheduler = make_scheduler(runner)
    scheduler.add([new(1, [5, 6]), new(2, [7, 8])], {1: compiled("[0-9]+")})
    plan = scheduler.schedule()
    for row in plan.rows:
        row.grammar = None  # a runner that does not look at it
    ended = {output.request_id: output for output in scheduler.update(plan, runner.execute(plan))}
    assert ended[1].finish_reason is FinishReason.ERROR
    assert "grammar" in ended[1].error
    assert ended[2].finish_reason is None
    scheduler.check()


def test_in_the_core_a_request_waits_for_its_grammar_and_the_others_do_not(make_peer) -> None:
    peer = make_peer(FakeRunner())
    peer.send(Add([new(1, [5, 6], pattern("[0-9]{4}x"))]), Add([new(2, [5, 6], max_tokens=5)]))
    tokens = tokens_of(until_finished(peer, {1, 2}))
    assert re.fullmatch("[0-9]{4}x", said(tokens[1]))
    assert tokens[2] == expected_tokens([5, 6], 5)


def test_siblings_share_a_grammar_and_no_state(make_peer) -> None:
    peer = make_peer(FakeRunner())
    text = pattern("[0-9]{4}x")
    params = SamplingParams(max_tokens=40)
    peer.send(Add([NewRequest(i, [5, 6, 7], params, group=0, grammar=text) for i in range(1, 4)]))
    tokens = tokens_of(until_finished(peer, {1, 2, 3}))
    assert all(re.fullmatch("[0-9]{4}x", said(tokens[i])) for i in (1, 2, 3))


def test_a_grammar_that_does_not_compile_ends_its_own_request(make_peer) -> None:
    peer = make_peer(FakeRunner())
    peer.send(Add([new(1, [5, 6], "start: nobody")]), Add([new(2, [5, 6], pattern("yes"))]))
    messages = until_finished(peer, {1, 2})
    [failed] = [o for o in outputs(messages) if o.request_id == 1]
    assert failed.finish_reason is FinishReason.ERROR
    assert "unknown name" in failed.error
    assert said(tokens_of(messages)[2]) == "yes"


def test_a_request_that_is_given_up_while_its_grammar_compiles_leaves_nothing(make_peer) -> None:
    peer = make_peer(FakeRunner())
    peer.send(Add([new(1, [5, 6], pattern("[0-9]{30}"))]), Abort([1]), Add([new(2, [5, 6], pattern("yes"))]))
    messages = until_finished(peer, {2})
    assert 1 not in tokens_of(messages)
    assert messages[-1].stats.waiting == 0


def test_the_anteroom_is_bounded() -> None:
    grammars = make_grammars()
    try:
        anteroom = Anteroom(grammars, most=2)
        anteroom.enter([new(1, [5], pattern("a")), new(2, [5], pattern("b"))])
        with pytest.raises(QueueFull, match="at most 2"):
            anteroom.enter([new(3, [5], pattern("c"))])
        anteroom.leave([1, 99])
        assert len(anteroom) == 1
        anteroom.enter([new(3, [5], pattern("c"))])
    finally:
        grammars.close()
