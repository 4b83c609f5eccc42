"""The forms of personal data and secrets that guardrails look for.

What looks like a card number, an IBAN or an identity card is checked by its check digits, so that order numbers pass.
Numbers are read in the plain form of a text (`plain`), in which the blanks and hyphens of typesetting are those of a
keyboard; it has as many characters as the text, so that a place in one is the same place in the other.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

# Of a match: where in it that stands which was looked for.
Spans = Callable[[str], Iterator[tuple[int, int]]]

# No-break and thin blanks, what is as good as nothing; hyphens of typesetting, the en dash, the minus sign. The long
# dashes part sentences. A low line is a border of words (Markdown writes _so_), and no blank between digits.
_BLANKS: Final = "\u00a0\u1680\u2000-\u200d\u202f\u205f\u2060\u3000\ufeff"
_HYPHENS: Final = "\u00ad\u2010-\u2013\u2212\ufe58\ufe63"
_BORDER: Final = "\x1f"


def _table() -> dict[int, str]:
    table = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full width
    for zero in (0x0660, 0x06F0):  # digits of Arabic and of Persian
        table |= {zero + digit: str(digit) for digit in range(10)}
    for characters, keyed in ((_BLANKS, " "), (_HYPHENS, "-")):
        for first, last in re.findall(r"(.)(?:-(.))?", characters, re.DOTALL):
            table |= dict.fromkeys(range(ord(first), ord(last or first) + 1), keyed)
    return table | {ord("_"): _BORDER, 0xFF3F: _BORDER}


_PLAIN: Final = _table()


def plain(text: str) -> str:
    """The text with the characters of a keyboard, as long as it was; low lines become borders of words."""
    return text.replace("_", _BORDER) if text.isascii() else text.translate(_PLAIN)


def _whole(check: Callable[[str], bool]) -> Spans:
    """All of a match, if it passes the check."""

    def spans(text: str) -> Iterator[tuple[int, int]]:
        if check(text):
            yield 0, len(text)

    return spans


class Form(NamedTuple):
    """`plain`: read in the plain form of a text. `spans` None: whatever the pattern matches counts."""

    pattern: str
    plain: bool = True
    spans: Spans | None = None


def _luhn(digits: str) -> bool:
    """The check digit of card numbers (ISO/IEC 7812)."""
    if not 13 <= len(digits) <= 19 or digits[0] not in "23456":
        return False
    numbers = [int(digit) for digit in digits]
    doubled = [number * 2 - 9 * (number > 4) for number in numbers[-2::-2]]
    return (sum(numbers[-1::-2]) + sum(doubled)) % 10 == 0


# Lengths of groups as cards print them, the longer first.
_GROUPS: Final = (*((4, 4, 4, 4, rest) for rest in (3, 2, 1)), (4, 4, 4, 4), (4, 6, 5), (4, 6, 4), (8, 8))
_EVENLY: Final = re.compile(r"\d(?:[ -]?\d)*", re.ASCII)
_DIGITS: Final = re.compile(r"\d+", re.ASCII)


def _cards(run: str) -> Iterator[tuple[int, int]]:
    """The card numbers in a run of digits, which may hold others: a date of expiry, the next card. May overlap.

    One by itself may be grouped as it likes, with single blanks or hyphens; others are known by the groups of cards.
    """
    for part in _EVENLY.finditer(run):
        if _luhn(part.group().replace(" ", "").replace("-", "")):
            yield part.span()
    groups = [match.span() for match in _DIGITS.finditer(run)]
    lengths = [end - start for start, end in groups]
    at = 0
    while at < len(groups):
        taken = 0
        if 13 <= lengths[at] <= 19:
            taken = int(_luhn(run[slice(*groups[at])]))
        elif lengths[at] in (4, 8):
            ahead, digits = tuple(lengths[at : at + 5]), [run[start:end] for start, end in groups[at : at + 5]]
            for shape in _GROUPS:
                if ahead[: len(shape)] == shape and _luhn("".join(digits[: len(shape)])):
                    taken = len(shape)
                    break
        if taken:
            yield groups[at][0], groups[at + taken - 1][1]
        at += taken or 1


# By length, the countries whose IBANs have it (SWIFT's IBAN registry).
_IBAN_COUNTRIES: Final = {
    15: "NO", 16: "BE", 18: "DK FI FK FO GL NL SD", 19: "MK SI", 20: "AT BA EE KZ LT LU MN XK", 21: "CH HR LI LV",
    22: "BG BH CR DE GB GE IE ME RS VA", 23: "AE GI IL IQ OM SO TL", 24: "AD CZ ES MD PK RO SA SE SK ST TN VG",
    25: "LY PT", 26: "IS TR", 27: "BI DJ FR GR IT MC MR SM", 28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
    29: "BR EG PS QA UA", 30: "JO KW MU YE", 31: "MT SC", 32: "LC", 33: "RU",
}  # fmt: skip
_IBANS: Final = "|".join(
    rf"(?:{countries.replace(' ', '|')})\d{{2}}(?:[ \-]{{0,2}}[A-Z0-9]){{{length - 4}}}"
    for length, countries in _IBAN_COUNTRIES.items()
)


def _iban(text: str) -> bool:
    """The check digits of an IBAN (ISO 13616)."""
    bare = text.replace(" ", "").replace("-", "")
    if not 15 <= len(bare) <= 34:
        return False
    return int("".join(str(int(character, 36)) for character in bare[4:] + bare[:4])) % 97 == 1


def _cn_id(text: str) -> bool:
    """The check character of an identity card of China (GB 11643)."""
    weights = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
    rest = sum(weight * int(digit) for weight, digit in zip(weights, text[:17], strict=True)) % 11
    return "10X98765432"[rest] == text[17].upper()


def _us_ssn(text: str) -> bool:
    area, group, serial = text.split("-")
    return area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"


def _address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _ipv6(text: str) -> bool:
    """`12:30:45` is a time, and `a::b` a name in a program."""
    return _address(text) and any(len(group) > 2 for group in text.split(":"))


# Of European scripts, with accents that stand by themselves: those of scripts that put no blanks between words would
# take in what stands before.
_LETTERS: Final = r"A-Za-z0-9\x{c0}-\x{24f}\x{300}-\x{36f}\x{370}-\x{52f}"
_EXTENSION: Final = r"(?:[ ,;]{0,2}(?i:x|#|ext(?:ension)?[ :.]{0,2})\d{1,6})?"
FORMS: Final[dict[str, tuple[Form, ...]]] = {
    "email": (
        Form(
            rf"[{_LETTERS}._%+-]{{1,64}}@(?:[{_LETTERS}](?:[{_LETTERS}-]{{0,61}}[{_LETTERS}])?\.){{1,8}}[{_LETTERS}]{{2,24}}",
            plain=False,
        ),
    ),
    "phone": (
        Form(rf"(?:\+|\b00)[1-9](?:[ ().\-/]{{0,3}}\d){{7,14}}{_EXTENSION}\b"),
        Form(rf"(?:\(\d{{3}}\)[ .\-]{{0,2}}|\b\d{{3}}[-. ])\d{{3}}[-. ]\d{{4}}{_EXTENSION}\b"),
        Form(rf"\(\d{{3}}\) ?\d{{7}}{_EXTENSION}\b"),
        Form(r"\b1[3-9]\d[ -]?\d{4}[ -]?\d{4}\b"),
    ),
    "card_number": (Form(r"\b\d(?:[\s.\-]{0,4}\d){12,}\b", spans=_cards),),
    "iban": (
        Form(rf"(?i)\b(?:{_IBANS})\b", spans=_whole(_iban)),
        # Of a country that is not in the registry yet.
        Form(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,4})?\b", spans=_whole(_iban)),
    ),
    "ip_address": (
        Form(r"\b\d{1,3}(?:\.\d{1,3}){3}\b", spans=_whole(_address)),
        Form(r"\b[0-9A-Fa-f]{1,4}(?::[0-9A-Fa-f]{0,4}){2,7}", spans=_whole(_ipv6)),
    ),
    "us_ssn": (Form(r"\b\d{3}-\d{2}-\d{4}\b", spans=_whole(_us_ssn)),),
    "cn_id_card": (Form(r"\b[1-9]\d{16}[0-9Xx]\b", spans=_whole(_cn_id)),),
    "secret": (
        Form(r"\b(?:sk|pk|rk|tl|tla)[-_][A-Za-z0-9_-]{20,200}", plain=False),
        Form(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", plain=False),
        Form(r"\bgh[pousr]_[A-Za-z0-9]{30,255}\b", plain=False),
        Form(r"\bgithub_pat_[A-Za-z0-9_]{30,255}\b", plain=False),
        Form(r"\bxox[abeoprs]-[A-Za-z0-9-]{10,250}\b", plain=False),
        Form(r"\bAIza[A-Za-z0-9_-]{35}", plain=False),
        Form(r"\beyJ[A-Za-z0-9_-]{10,1000}\.[A-Za-z0-9_-]{10,1000}\.[A-Za-z0-9_-]{10,1000}", plain=False),
        Form(
            r"-----BEGIN (?:[A-Z]+ ){0,3}PRIVATE KEY-----[A-Za-z0-9+/=\s]*(?:-----END [A-Z ]{0,40}KEY-----)?",
            plain=False,
        ),
    ),
}
