"""What can be seen in a request without understanding it: terms, shape, and an estimate of its length in tokens.

Only system and user text counts: what a model or a tool said earlier must not steer the choice. Every feature is
bounded and every term counts once, so repeating a phrase buys nothing, and what only begs for effort is taken out
(`begging.py`). Read next: `task.py`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from tiers import lexicon
from tiers.begging import without

Message = Mapping[str, Any]

MOST_CHARS_PER_TOKEN: Final = 70
HEAD_CHARS: Final = 900
TAIL_CHARS: Final = 300

_WORD: Final = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?|\d+|[{}()\[\];=<>\\$^+*/]")
_CODE: Final = re.compile(
    r"```|^\s*(?:def|class|import|from|#include|function|const|let|var|public|private|SELECT|package|using)\b"
    r"|[;{}]\s*$|=>|\b\w+\(\w*\)|</\w+>|::|&&|\|\|",
    re.MULTILINE,
)
_MATH: Final = re.compile(r"[=+*/^<>≤≥≠±√∑∫π]|\\[a-z]+|(?<=\d)\s*-\s*(?=\d)")
_LATEX: Final = re.compile(r"\\(?:frac|sqrt|cdot|sum|int|text|left|begin|mathbb|boxed|angle|circ)\b|\$[^$\n]{1,200}\$")
_OPTION: Final = re.compile(r"(?:^|\s)\(?[A-Ja-j1-9][.):]\s", re.MULTILINE)
_QUOTED: Final = re.compile(r'"""|"[^"\n]{15,}"|“[^”\n]{15,}”|<[a-z_]+>|^\s*---', re.MULTILINE)
_FIELD: Final = re.compile(r"^[ \t]*[A-Z][\w /-]{0,30}:", re.MULTILINE)
_NOT_LATIN: Final = re.compile(r"[\u0250-\u1dff\u2e80-\uffff\U00010000-\U0001f2ff\U00020000-\U0003ffff]")
_WH: Final = frozenset(
    {"what", "who", "whom", "whose", "when", "where", "which", "why", "how", "is", "are", "do", "does", "did", "can"}
)

# The order is the order of the numeric inputs of the classifier: append, never reorder, and train again.
TRAINED: Final = (
    "length",
    "lines",
    "digits",
    "math_symbols",
    "latex",
    "code",
    "ends_with_question",
    "starts_with_question",
    "options",
    "quoted",
    "fields",
    "short",
    "long",
    "capitals",
    "sentence_end",
    "system_prompt",
    *(f"words_{family}" for family in lexicon.FAMILIES),
)
# Instructions stand within this many characters of either end of a text.
_INSTRUCTION_CHARS: Final = 220
_LEXICON_WORD: Final = re.compile(r"[a-z][a-z'#+-]*[a-z#+]|[a-z]")


@dataclass(frozen=True, slots=True)
class Features:
    """Terms and numbers of one request.

    Attributes:
        terms: distinct words, pairs of neighbours and opening words, in order of first appearance.
        words: distinct words, for the check whether the vocabulary is known.
        values: features by name, each in [0, 1]; those of `TRAINED` feed the classifier.
        prompt_tokens: estimate over all messages, about 4 per message added for the chat template.
    """

    terms: tuple[str, ...]
    words: tuple[str, ...]
    values: dict[str, float]
    prompt_tokens: int

    def vector(self) -> list[float]:
        """The numeric inputs of the classifier, in the order of `TRAINED`."""
        return [self.values[name] for name in TRAINED]


def text_of(message: Message) -> str:
    """Text of one message: its string content, or the text parts of its list content."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        parts = (part.get("text") for part in content if isinstance(part, Mapping))
        return "\n".join(part for part in parts if isinstance(part, str))
    return ""


def chars_of(message: Message) -> int:
    """Characters of the text of one message, without putting it together."""
    content = message.get("content")
    if isinstance(content, str):
        return len(content)
    if isinstance(content, Sequence):
        texts = (part.get("text") for part in content if isinstance(part, Mapping))
        return sum(len(text) for text in texts if isinstance(text, str))
    return 0


def has_images(messages: Sequence[Message]) -> bool:
    """Whether any message holds an image part (`image_url`, or `input_image` of the responses dialect)."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(map(_is_image, content)):
            return True
    return False


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image_url", "input_image", "image")


def extract(
    messages: Sequence[Message],
    tools: bool = False,
    response_format: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> Features:
    """Features of a chat request.

    Args:
        messages: chat messages as in the OpenAI dialect; content is text or typed parts.
        tools: whether the request offers tools.
        response_format: the request's `response_format`.
        max_tokens: bound of the answer, in tokens.
    """
    system = "\n".join(text_of(m) for m in messages if m.get("role") in ("system", "developer"))
    turns = [text_of(m) for m in messages if m.get("role") == "user"]
    last = turns[-1] if turns else ""
    system_view, last_view = bare(view(system)), bare(view(last))
    terms: dict[str, None] = {}
    words: dict[str, None] = {}
    for text in (system_view, last_view):
        _add_terms(text, terms, words)
    both = f"{system_view}\n{last_view}" if system_view else last_view
    values = _shape(both, last_view, _told(system, system_view) + _told(last, last_view))
    edges = [text[:_INSTRUCTION_CHARS] for text in (system_view, last_view)]
    edges += [text[-_INSTRUCTION_CHARS:] for text in (system_view, last_view) if len(text) > _INSTRUCTION_CHARS]
    found = lexicon.counts(_LEXICON_WORD.findall("\n".join(edges).lower()))
    values.update((f"words_{name}", _saturate(n, 4)) for name, n in zip(lexicon.FAMILIES, found, strict=True))
    values["system_prompt"] = 1.0 if system else 0.0
    values["turns"] = _saturate(len(turns) - 1, 4)
    values["tools"] = 1.0 if tools else 0.0
    values["wants_json"] = 1.0 if wants_json(response_format) else 0.0
    values["short_answer"] = 1.0 if max_tokens is not None and max_tokens <= 8 else 0.0
    return Features(tuple(terms), tuple(words), values, estimate_prompt_tokens(messages))


def wants_json(response_format: Mapping[str, Any] | None) -> bool:
    """Whether the request binds the answer to JSON."""
    return response_format is not None and response_format.get("type") in ("json_object", "json_schema")


def view(text: str) -> str:
    """What is looked at of a text: its beginning and its end, where instructions stand; between them are data."""
    if len(text) <= HEAD_CHARS + TAIL_CHARS:
        return text
    return f"{text[:HEAD_CHARS]}\n{text[-TAIL_CHARS:]}"


@lru_cache(maxsize=64)
def bare(text: str) -> str:
    """A view without what begs. The same request asks twice: for its features, and for what is to be embedded."""
    return without(text)


def _told(text: str, view: str) -> int:
    """Characters of a text, or of its view where most of what could be seen was taken out: it would go on like that."""
    seen = min(len(text), HEAD_CHARS + TAIL_CHARS)
    return len(text) if len(view) > seen / 2 else len(view)


def _add_terms(text: str, terms: dict[str, None], words: dict[str, None]) -> None:
    tokens = ["#" if token.isdigit() else token for token in _WORD.findall(text.lower())]
    for token in tokens:
        terms[token] = None
        if token.isalpha():
            words[token] = None
    for left, right in itertools.pairwise(tokens):
        terms[f"{left} {right}"] = None
    # The first words carry the verb of the instruction; marking them tells "list" the verb from "list" the noun.
    for token in tokens[:3]:
        terms[f"^{token}"] = None


def _shape(text: str, last: str, full_length: int) -> dict[str, float]:
    length = max(1, len(text))
    count = len(text.split())
    first = last.split(None, 1)[0].lower().strip("',.:") if last.split() else ""
    stripped = last.rstrip()
    raw = text.encode("utf-8", "surrogatepass")
    capitals = (len(raw) - len(raw.translate(None, _CAPITALS))) / length
    digits = (len(raw) - len(raw.translate(None, _DIGITS))) / length
    return {
        "length": min(1.0, math.log1p(full_length) / math.log(20_000)),
        "lines": _saturate(text.count("\n"), 20),
        "digits": min(1.0, 8 * digits),
        "math_symbols": _saturate(len(_MATH.findall(text)), 12),
        "latex": _saturate(len(_LATEX.findall(text)), 3),
        "code": _saturate(len(_CODE.findall(text)), 6),
        "ends_with_question": 1.0 if stripped.endswith(("?", "？")) else 0.0,
        "starts_with_question": 1.0 if first in _WH else 0.0,
        "options": _saturate(len(_OPTION.findall(text)), 4),
        "quoted": _saturate(len(_QUOTED.findall(text)), 2),
        "fields": _saturate(len(_FIELD.findall(text)), 4),
        "short": 1.0 if count <= 12 else 0.0,
        "long": _saturate(count, 200),
        "capitals": min(1.0, 8 * capitals),
        "sentence_end": 1.0 if stripped.endswith((".", "!", "…")) else 0.0,
        "not_latin": 0.0 if text.isascii() else len(_NOT_LATIN.findall(text)) / length,
    }


def _saturate(value: float, full: float) -> float:
    """0 at 0, 1 from `full` on."""
    return min(1.0, max(0.0, value / full))


# Byte classes of UTF-8 for the token estimate: bytes.translate deletes them at memory speed.
_CAPITALS: Final = bytes(range(65, 91))
_LETTERS: Final = _CAPITALS + bytes(range(97, 123))
_DIGITS: Final = bytes(range(48, 58))
_SPACES: Final = b" \t\r\n"
_HIGH: Final = bytes(range(128, 256))
# Tokens per character of each class, fitted by least squares against a 49k byte-pair vocabulary (docs/routing.md).
_PER_LETTER: Final = 0.24
_PER_DIGIT: Final = 1.0
_PER_MARK: Final = 0.85
_PER_NEWLINE: Final = 0.7
_PER_TAB: Final = 0.25  # vocabularies merge a few
# The space before a word is part of its token, and a short run is paid for by its line; a long one makes tokens, of up
# to 16 spaces in some vocabularies and of 80 in others.
_LONG_RUN: Final = b" " * 16
_PER_WIDE_CHAR: Final = 1.3  # Chinese, Japanese, Korean: 0.7 to 2 by vocabulary; emoji
_PER_OTHER_CHAR: Final = 0.65  # Cyrillic, Arabic, accented Latin, ...
# First bytes of such a character in UTF-8: U+3000 to U+DFFF, U+F000 to U+FFFF, and what lies above, emoji above all.
_WIDE: Final = bytes((*range(0xE3, 0xEE), *range(0xEF, 0xF5)))
_SLICE_CHARS: Final = 1 << 18


def estimate_tokens(text: str) -> int:
    """About how many tokens `text` has, from its characters by script; 0 for the empty string, else at least 1.

    Never less than one for every `MOST_CHARS_PER_TOKEN` characters, whatever they are, so no text is too long unseen.

    An estimate for routing, and for the bill only where no server said how many there were. Cost: microseconds, linear
    in the length, about 5 ms for a million characters. A long text is counted in slices, so that the interpreter can
    turn to other threads in between.
    """
    if not text:
        return 0
    if len(text) <= _SLICE_CHARS:
        return max(1, round(_weight(text)))
    return round(sum(_weight(text[i : i + _SLICE_CHARS]) for i in range(0, len(text), _SLICE_CHARS)))


def _weight(text: str) -> float:
    """The estimate before rounding."""
    raw = text.encode("utf-8", "surrogatepass")
    size = len(raw)
    letters = size - len(raw.translate(None, _LETTERS))
    digits = size - len(raw.translate(None, _DIGITS))
    spaces = size - len(raw.translate(None, _SPACES))
    newlines = raw.count(b"\n")
    if b"\r" in raw:
        newlines += raw.count(b"\r") - raw.count(b"\r\n")
    total = _PER_LETTER * letters + _PER_DIGIT * digits + _PER_NEWLINE * newlines + _PER_TAB * raw.count(b"\t")
    total += raw.count(_LONG_RUN)
    if size == len(text):
        marks = size - letters - digits - spaces
    else:
        high = size - len(raw.translate(None, _HIGH))
        marks = size - letters - digits - spaces - high
        wide = size - len(raw.translate(None, _WIDE))
        total += _PER_WIDE_CHAR * wide + _PER_OTHER_CHAR * (len(text) - (size - high) - wide)
    return total + _PER_MARK * marks


def estimate_prompt_tokens(messages: Sequence[Message]) -> int:
    """Tokens of a conversation: all its text, and 4 per message for the template around it."""
    return estimate_turns([text_of(message) for message in messages])


def estimate_turns(texts: Sequence[str]) -> int:
    """The same for the texts of its turns."""
    return 4 * len(texts) + estimate_tokens("".join(texts))
