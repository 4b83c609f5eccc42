"""`make bench-sessions`: what conversations cost that stay on their tier, beside some whose turns are decided alone.

Conversations are chains of public prompts of mixed kinds, with answers of drawn lengths: the next turn is of the same
kind with a probability that the setting names, else of another, and some are short follow-ups. What each turn wants is
what `tier: auto` says, by a classifier trained on the other half of the prompts. Each model keeps what it has read of a
conversation in its prompt cache; the rest it reads anew. Needs the data sets that the training needs (`--data DIR` or
TIERLINE_DATA) and the extra [train].
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report import Row, report
from tiers import TIERS
from tiers.choose import choose
from tiers.features import estimate_tokens, text_of
from tiers.session import SWITCH_WEIGHT, Pin, SwitchCost, Terms, Wish, answered, step
from tiers.task import TaskClassifier
from tiers.train import corpus
from tiers.train.corpus import Example
from tiers.train.evaluate import train

TERMS = Terms(margin=0.05, downgrade_after=None)
# Dollars per million tokens of input; a vendor's tenth for what is cached, four times as much for output.
INPUT = dict(zip(TIERS, (0.10, 0.20, 0.60, 0.90), strict=True))
CACHED, OUTPUT = 0.1, 4.0
SYSTEM_TOKENS = (400, 4000)  # of the system prompt: a plain assistant, one with instructions and documents
FOLLOW_UPS = (
    "yes please", "and the second one?", "go on", "why?", "shorter", "thanks", "are you sure?", "what about the rest?",
    "ok, do it", "can you say that again in other words?",
)  # fmt: skip
FOLLOWS_UP = 0.15


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn wants, the tokens that it adds to the prompt, and those of its answer."""

    wish: Wish
    asked: int
    answer: int


@dataclass(slots=True)
class Tally:
    """What the turns of many conversations came to."""

    sessions: int = 0
    turns: int = 0
    switches: int = 0
    oscillations: int = 0  # A → B → A, at any distance
    late: int = 0  # turns that would have gained more than any switch may cost
    reread_tokens: int = 0
    reread_usd: float = 0.0
    usd: float = 0.0
    success: list[float] = field(default_factory=list)


def conversation(
    chance: random.Random, by_kind: dict[str, list[str]], classifier: TaskClassifier, stays: float
) -> list[Turn]:
    """Three to forty turns, ten on average."""
    kinds = sorted(by_kind)
    kind = chance.choice(kinds)
    messages: list[dict[str, Any]] = []
    turns = []
    for number in range(min(40, 3 + int(chance.expovariate(1 / 7.5)))):
        if number and chance.random() >= stays:
            kind = chance.choice([other for other in kinds if other != kind])
        follows = number > 0 and chance.random() < FOLLOWS_UP
        text = chance.choice(FOLLOW_UPS) if follows else chance.choice(by_kind[kind])
        messages.append({"role": "user", "content": text})
        found = choose(classifier.classify(messages))
        messages.append({"role": "assistant", "content": ""})
        wish = Wish(found.tier, known=bool(found.p_success), p_success=found.p_success)
        turns.append(Turn(wish, estimate_tokens(text), max(1, int(chance.lognormvariate(5.5, 0.8)))))
    return turns


def alone(pin: Pin | None, turn: Turn, prompt: int) -> Pin:
    return Pin(turn.wish.tier, turn.wish.tier)


def first(pin: Pin | None, turn: Turn, prompt: int) -> Pin:
    return pin or Pin(turn.wish.tier, turn.wish.tier)


def sessions(terms: Terms) -> Callable[[Pin | None, Turn, int], Pin]:
    def decide(pin: Pin | None, turn: Turn, prompt: int) -> Pin:
        cost = SwitchCost()
        if pin is not None:
            lost = pin.tokens * INPUT[pin.tier] * (1 - CACHED) * 1000  # nano-dollars per token
            price = INPUT[turn.wish.tier] * 1000
            cost = SwitchCost(round(lost), round(prompt * price + turn.answer * price * OUTPUT))
        taken = step(pin, turn.wish, terms, cost)
        return answered(taken.pin, taken.tier, taken.tier, prompt + turn.answer)

    return decide


def play(
    conversations: Iterable[Sequence[Turn]], decide: Callable[[Pin | None, Turn, int], Pin], system_tokens: int
) -> Tally:
    tally = Tally()
    for turns in conversations:
        tally.sessions += 1
        pin: Pin | None = None
        prompt = system_tokens
        cached: dict[str, int] = defaultdict(int)
        visited: list[str] = []
        for turn in turns:
            before, prompt = prompt, prompt + turn.asked
            pin = decide(pin, turn, prompt)
            tier = pin.tier
            if visited and visited[-1] != tier:
                tally.switches += 1
                tally.oscillations += len(visited) > 1 and visited[-2] == tier
            if not visited or visited[-1] != tier:
                visited.append(tier)
            reread = before - cached[tier] if before > system_tokens else 0  # a first turn is read once by whomever
            fresh = prompt - cached[tier]
            dollars = INPUT[tier] / 1e6
            tally.reread_tokens += reread
            tally.reread_usd += reread * dollars * (1 - CACHED)
            tally.usd += (fresh + cached[tier] * CACHED + turn.answer * OUTPUT) * dollars
            odds = turn.wish.p_success
            if odds:
                tally.success.append(odds[tier])
                wanted = turn.wish.tier
                gain = odds[wanted] - odds[tier] if TIERS.index(wanted) > TIERS.index(tier) else 0.0
                tally.late += gain > TERMS.margin + SWITCH_WEIGHT
            prompt += turn.answer
            cached[tier] = prompt
            tally.turns += 1
    return tally


SYSTEMS: tuple[tuple[str, Callable[[Pin | None, Turn, int], Pin]], ...] = (
    ("tierline, session: {}", sessions(TERMS)),
    ("tierline, downgrade_after: 5", sessions(Terms(0.05, 5))),
    ("each turn alone", alone),
    ("its first tier for good", first),
)


def rows_of(setting: str, runs: Sequence[Sequence[Sequence[Turn]]], system_tokens: int) -> list[Row]:
    rows = []
    for system, decide in SYSTEMS:
        tallies = [play(run, decide, system_tokens) for run in runs]
        for metric, unit, value in (
            ("switches", "1/session", lambda t: t.switches / t.sessions),
            ("oscillations", "1/session", lambda t: t.oscillations / t.sessions),
            ("late_upgrades", "1/turn", lambda t: t.late / t.turns),
            ("reread_tokens", "tokens/session", lambda t: t.reread_tokens / t.sessions),
            ("reread_cost", "USD/1000 sessions", lambda t: t.reread_usd / t.sessions * 1000),
            ("cost", "USD/1000 sessions", lambda t: t.usd / t.sessions * 1000),
            ("expected_success", "share", lambda t: statistics.fmean(t.success)),
        ):
            rows.append(Row.of(metric, system, setting, unit, [value(tally) for tally in tallies]))
    return rows


def _by_kind(examples: Iterable[Example]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for example in examples:
        found[example.kind].append("\n".join(text_of(message) for message in example.messages))
    return dict(found)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=os.environ.get("TIERLINE_DATA"), help="folder of the data sets")
    parser.add_argument("--sessions", type=int, default=400, help="conversations per run")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.data is None:
        sys.exit("bench-sessions needs the data sets: give --data DIR or set TIERLINE_DATA (see tiers/DATA.md)")
    examples = corpus.load(options.data)
    random.Random(1).shuffle(examples)
    half = len(examples) // 2
    classifier = train(examples[:half]).classifier
    by_kind = _by_kind(examples[half:])
    rows: list[Row] = []
    for stays in (0.9, 0.75, 0.0):
        runs = []
        for seed in range(options.runs):
            chance = random.Random(seed)
            runs.append([conversation(chance, by_kind, classifier, stays) for _ in range(options.sessions)])
        for tokens in SYSTEM_TOKENS:
            rows += rows_of(f"kind stays p={stays:g}, system prompt {tokens}", runs, tokens)
    report("sessions", rows)


if __name__ == "__main__":
    main()
