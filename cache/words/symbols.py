"""What signs say that no word does: currencies, percentages, arithmetic, negative numbers, hours before noon or after.

The words of a text leave them out: "$50" and "€50", "7 + 5" and "7 - 5", "-5" and "5", "5 am" and "5 pm" have the same.
"""

from __future__ import annotations

import re

# As `lexicon.UNITS` names them.
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "gbp", "¥": "yen", "￥": "yen", "₹": "rupee", "₽": "rouble", "₩": "won"}
_PERCENT = re.compile(r"(?<=\d)\s?[%％]")
_HALF_OF_THE_DAY = re.compile(r"(?<=\d)\s?([ap])\.?\s?m\b\.?", re.IGNORECASE)
_NEGATIVE = re.compile(r"(?:(?<=^)|(?<=[\s(=]))[-−](?=\d)")
# Between two operands. A dash or a stroke without space around it joins a date, a range or a ratio.
_OPERATOR = re.compile(r"(?<=[\w)])\s*([+*×÷^=<>≤≥]|\s[-−/]\s)\s*(?=[\w(])")


def spelled_out(text: str) -> str:
    """The text with words for signs behind a number: "5 p.m." is "5pm", "8 %" is "8 percent"."""
    text = _HALF_OF_THE_DAY.sub(lambda found: f"{found.group(1).lower()}m", text)
    return _PERCENT.sub(" percent", text)


def currencies(text: str) -> frozenset[str]:
    """The currencies that signs name, as units."""
    return frozenset(unit for sign, unit in _CURRENCIES.items() if sign in text)


def operators(text: str) -> tuple[str, ...]:
    """What is done to numbers, in order, and a mark for each that is negative."""
    found = (match.group(1).strip().replace("−", "-") for match in _OPERATOR.finditer(text))
    return (*found, *("negative" for _ in _NEGATIVE.finditer(text)))
