"""Guardrails made ready: what they look for in a text, found in time that grows with the text only.

Patterns are RE2's, which never goes back in a text. What looks like a card number, an IBAN or an identity card is
checked by its check digits, so that order numbers pass. Which texts are looked at, and what becomes of a finding, is
the gateway's: `gateway/guarding/`.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import re2

from policies.schema.guardrails import Guardrail, Guardrails
from policies.yamlfile import Document, Problem
from policies.yamlread import Location

# Of European scripts: those of scripts that put no blanks between words would take in what stands before.
_LETTERS: Final = r"A-Za-z0-9\x{c0}-\x{24f}\x{370}-\x{52f}"
_BLANKS: Final = r"[\s\pZ\x{200b}]+"
_OPTIONS: Final = re2.Options()
_OPTIONS.log_errors = False
_OPTIONS.max_mem = 8 << 20


class Finding(NamedTuple):
    """A place in a text, from `start` to before `end`, and what is there: a kind of personal data, or the rule."""

    start: int
    end: int
    kind: str


@dataclass(frozen=True, slots=True)
class _Finder:
    """`check` says whether what the pattern matched is what it looks like."""

    kind: str
    pattern: Any
    check: Callable[[str], bool] | None = None


@dataclass(frozen=True, slots=True)
class Guard:
    """A rule, compiled."""

    rule: Guardrail
    finders: tuple[_Finder, ...]

    def find(self, text: str) -> list[Finding]:
        """All findings, in their order, none within another."""
        found = [
            Finding(match.start(), match.end(), finder.kind)
            for finder in self.finders
            for match in finder.pattern.finditer(text)
            if match.end() > match.start() and (finder.check is None or finder.check(match.group()))
        ]
        if len(found) > 1:
            found.sort()
            found = list(_apart(found))
        return found

    def replace(self, text: str, found: Sequence[Finding]) -> str:
        """The text with the rule's replacement in place of each finding."""
        pieces: list[str] = []
        at = 0
        for start, end, kind in found:
            pieces += text[at:start], self.rule.replacement.replace("{kind}", kind)
            at = end
        return "".join((*pieces, text[at:]))


@dataclass(frozen=True, slots=True)
class Guards:
    """The guardrails of a policy. `fingerprint` is another where another answer could come out of them."""

    before: tuple[Guard, ...]
    after: tuple[Guard, ...]
    streams: Literal["window", "hold"]
    window: int
    fingerprint: str


def compile_guards(document: Document, guardrails: Guardrails | None) -> tuple[Guards | None, list[Problem]]:
    """The rules ready for use, None where there are none, and the patterns that cannot be used."""
    if guardrails is None or not (guardrails.before or guardrails.after):
        return None, []
    problems: list[Problem] = []

    def ready(side: str, rules: Sequence[Guardrail]) -> tuple[Guard, ...]:
        guards = []
        for index, rule in enumerate(rules):
            path: Location = ("guardrails", side, index)
            guards.append(Guard(rule, tuple(_finders(document, path, rule, problems))))
        return tuple(guards)

    before, after = ready("before", guardrails.before), ready("after", guardrails.after)
    said = "\n".join(rule.model_dump_json() for rule in guardrails.after)
    fingerprint = hashlib.sha256(said.encode()).hexdigest()[:16] if said else ""
    return Guards(before, after, guardrails.streams, guardrails.window, fingerprint), problems


def _finders(document: Document, path: Location, rule: Guardrail, problems: list[Problem]) -> Iterator[_Finder]:
    for kind in rule.personal_data:
        for pattern, check in _PERSONAL[kind]:
            yield _Finder(kind, re2.compile(pattern, _OPTIONS), check)
    if rule.phrases:
        alternatives = "|".join(map(_phrase, rule.phrases))
        yield _Finder(rule.name, re2.compile(f"(?i)(?:{alternatives})", _OPTIONS))
    for index, pattern in enumerate(rule.patterns):
        try:
            compiled = re2.compile(pattern, _OPTIONS)
        except re2.error as error:
            reason = error.args[0].decode(errors="replace") if error.args else "it cannot be compiled"
            where: Location = (*path, "patterns", index)
            problems.append(document.problem(where, f"not a regular expression that RE2 takes: {reason}."))
            continue
        if compiled.search("") is not None:
            problems.append(document.problem((*path, "patterns", index), "it matches where there is nothing."))
            continue
        yield _Finder(rule.name, compiled)


def _phrase(phrase: str) -> str:
    """A pattern for whole words, where the phrase begins and ends with such: RE2 knows the borders of ASCII words."""
    words = _BLANKS.join(re2.escape(word) for word in phrase.split())
    begins = r"\b" if _is_word(phrase[0]) else ""
    return begins + words + (r"\b" if _is_word(phrase[-1]) else "")


def _is_word(character: str) -> bool:
    return character.isascii() and (character.isalnum() or character == "_")


def _apart(found: list[Finding]) -> Iterator[Finding]:
    """Findings that overlap as one."""
    current = found[0]
    for finding in found[1:]:
        if finding.start < current.end:
            current = Finding(current.start, max(current.end, finding.end), current.kind)
        else:
            yield current
            current = finding
    yield current


def _luhn(text: str) -> bool:
    """The check digit of card numbers (ISO/IEC 7812)."""
    digits = [int(character) for character in text if character.isdigit()]
    if not 13 <= len(digits) <= 19 or digits[0] not in (2, 3, 4, 5, 6):
        return False
    doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _iban(text: str) -> bool:
    """The check digits of an IBAN (ISO 13616)."""
    plain = text.replace(" ", "")
    if not 15 <= len(plain) <= 34:
        return False
    return int("".join(str(int(character, 36)) for character in plain[4:] + plain[:4])) % 97 == 1


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


_Pattern = tuple[str, Callable[[str], bool] | None]
_PERSONAL: Final[dict[str, tuple[_Pattern, ...]]] = {
    "email": (
        (
            rf"[{_LETTERS}._%+-]{{1,64}}@(?:[{_LETTERS}](?:[{_LETTERS}-]{{0,61}}[{_LETTERS}])?\.){{1,8}}[{_LETTERS}]{{2,24}}",
            None,
        ),
    ),
    "phone": (
        (r"(?:\+|\b00)[1-9](?:[ ().\-/]{0,2}\d){7,14}\b", None),
        (r"(?:\(\d{3}\) ?|\b\d{3}[-. ])\d{3}[-. ]\d{4}\b", None),
        (r"\b1[3-9]\d{9}\b", None),
    ),
    "card_number": ((r"\b\d(?:[ -]?\d){12,18}\b", _luhn),),
    "iban": ((r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,4})?\b", _iban),),
    "ip_address": (
        (r"\b\d{1,3}(?:\.\d{1,3}){3}\b", _address),
        (r"\b[0-9A-Fa-f]{1,4}(?::[0-9A-Fa-f]{0,4}){2,7}", _ipv6),
    ),
    "us_ssn": ((r"\b\d{3}-\d{2}-\d{4}\b", _us_ssn),),
    "cn_id_card": ((r"\b[1-9]\d{16}[0-9Xx]\b", _cn_id),),
    "secret": (
        (r"\b(?:sk|pk|rk|tl|tla)[-_][A-Za-z0-9_-]{20,200}", None),
        (r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", None),
        (r"\bgh[pousr]_[A-Za-z0-9]{30,255}\b", None),
        (r"\bgithub_pat_[A-Za-z0-9_]{30,255}\b", None),
        (r"\bxox[abeoprs]-[A-Za-z0-9-]{10,250}\b", None),
        (r"\bAIza[A-Za-z0-9_-]{35}", None),
        (r"\beyJ[A-Za-z0-9_-]{10,1000}\.[A-Za-z0-9_-]{10,1000}\.[A-Za-z0-9_-]{10,1000}", None),
        (r"-----BEGIN (?:[A-Z]+ ){0,3}PRIVATE KEY-----[A-Za-z0-9+/=\s]*(?:-----END [A-Z ]{0,40}KEY-----)?", None),
    ),
}
