"""Guardrails made ready: what they look for in a text, found in time that grows with the text only.

Patterns are RE2's, which never goes back in a text. The forms of personal data are in `personal_data.py`. Which texts
are looked at, and what becomes of a finding, is the gateway's: `gateway/guarding/`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import re2

from policies.personal_data import FORMS, Spans, plain
from policies.schema.guardrails import Guardrail, Guardrails
from policies.yamlfile import Document, Problem
from policies.yamlread import Location

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
    """`plain`: it reads the plain form of a text. `spans` says what of a match is what it looks like."""

    kind: str
    pattern: Any
    plain: bool = False
    spans: Spans | None = None

    def find(self, text: str) -> Iterator[Finding]:
        for match in self.pattern.finditer(text):
            start, end = match.span()
            if self.spans is not None:
                for first, last in self.spans(match.group()):
                    yield Finding(start + first, start + last, self.kind)
            elif end > start:
                yield Finding(start, end, self.kind)


@dataclass(frozen=True, slots=True)
class Guard:
    """A rule, compiled."""

    rule: Guardrail
    finders: tuple[_Finder, ...]

    def find(self, text: str) -> list[Finding]:
        """All findings, in their order, none within another."""
        readable = plain(text) if any(finder.plain for finder in self.finders) else text
        found = [one for finder in self.finders for one in finder.find(readable if finder.plain else text)]
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
        for form in FORMS[kind]:
            yield _Finder(kind, re2.compile(form.pattern, _OPTIONS), form.plain, form.spans)
    # A low line is a letter only to phrases that have one.
    written = [phrase for phrase in rule.phrases if "_" in phrase]
    spoken = [plain(phrase) for phrase in rule.phrases if "_" not in phrase]
    for phrases, reads_plain in ((written, False), (spoken, True)):
        if phrases:
            alternatives = "|".join(map(_phrase, phrases))
            yield _Finder(rule.name, re2.compile(f"(?i)(?:{alternatives})", _OPTIONS), reads_plain)
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
