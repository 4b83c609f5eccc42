"""Pairs of questions that differ in one number, date, unit or code: made, so that there are many."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from cache.evaluation.files import Pair

_NUMBERS = (
    "How much is the fee for {} transfers a month?",
    "Can I send {} parcels with one label?",
    "What is the interest on {} euros?",
    "Is a deposit of {} dollars enough to rent a car?",
    "How do I divide {} by seven?",
    "How long does a battery of {} mAh last?",
    "What discount do I get for {} seats?",
    "Which plan allows {} users?",
)
_YEARS = (
    "Who won the election in {}?",
    "What was the inflation rate in {}?",
    "Which films came out in {}?",
    "How did the law change in {}?",
)
_DAYS = ("Is the office open on {}?", "Do trains run on {}?", "What is the deadline for orders placed on {}?")
_CODES = (
    "How do I reset error {}?",
    "What does status code {} mean?",
    "Where do I find spare parts for the {}?",
    "Which driver does the {} need?",
    "Is the {} compatible with this charger?",
)
_WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "twenty")
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = ("January", "March", "April", "June", "July", "August", "October", "November", "December")


def swaps(count: int = 2000, seed: int = 0) -> Iterator[Pair]:
    """`count` pairs of different meaning."""
    lot = random.Random(seed)
    kinds: tuple[tuple[tuple[str, ...], Callable[[], str]], ...] = (
        (_NUMBERS, lambda: str(lot.randrange(2, 9000))),
        (_NUMBERS, lambda: f"{lot.randrange(2, 900)},{lot.randrange(100, 999)}"),
        (_NUMBERS, lambda: lot.choice(_WORDS)),
        (_YEARS, lambda: str(lot.randrange(1950, 2031))),
        (_DAYS, lambda: lot.choice(_WEEKDAYS)),
        (_DAYS, lambda: f"{lot.choice(_MONTHS)} {lot.randrange(1, 29)}"),
        (_DAYS, lambda: f"{lot.randrange(1, 13)}/{lot.randrange(1, 29)}/{lot.randrange(2020, 2030)}"),
        (_CODES, lambda: f"{lot.choice('ABEHMRX')}{lot.randrange(100, 9999)}"),
        (_CODES, lambda: f"{lot.choice('ABEHMRX')}-{lot.randrange(10, 99)}{lot.choice('abnx')}"),
        (_CODES, lambda: f"{lot.randrange(1, 9)}.{lot.randrange(0, 20)}.{lot.randrange(0, 9)}"),
    )
    made = 0
    while made < count:
        frames, fill = lot.choice(kinds)
        frame, one, other = lot.choice(frames), fill(), fill()
        if one != other:
            made += 1
            yield Pair(frame.format(one), frame.format(other), False)
