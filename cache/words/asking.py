"""One form for the ways of asking the same: what is embedded instead of the question as it was typed.

"what's the capital of France", "Tell me the capital of France." and "What is the capital of France?" ask one thing, yet
an embedding puts them 0.09 apart: it reads the mark at the end and the polite frame as much as the words. Only these
are brought into one form; the guards compare the texts themselves.
"""

from __future__ import annotations

import re
from functools import lru_cache

_CONTRACTION = re.compile(r"\b(what|who|where|when|how|why)(?:['’]s|(?<=what)s)\b", re.IGNORECASE)
_SALUTATION = re.compile(r"^(?:(?:hi|hello|hey|please|kindly)(?: there)?\b[,!. ]*)+(?=\w)", re.IGNORECASE)
_FRAME = re.compile(
    r"^(?:(?:can|could|would|will) you (?:please |kindly )?(?:tell|inform) me|(?:please |kindly )?tell me|"
    r"do you (?:happen to )?know|i(?: would|['’]?d) like to know|i (?:want|need) to know)\s+"
    r"(?!about\b|if\b|whether\b|more\b|something\b)",
    re.IGNORECASE,
)
_CLOSING = re.compile(r"[, ]+(?:please|thanks|thank you)\s*(?=[.?!]*$)", re.IGNORECASE)
_NAMED = re.compile(r"^(?:the|my|our|your) ", re.IGNORECASE)
_EMBEDDED = re.compile(r"^(what|who|where) ((?:the|my|our|your) .*\S) (is|are|was|were)$", re.IGNORECASE)
_ASKS = re.compile(
    r"^(?:what|which|who|whom|whose|when|where|why|how|is|are|am|was|were|do|does|did|have|has|had|can|could|will|"
    r"would|should|may|must|might)\b",
    re.IGNORECASE,
)
_MARKS = " .?"


@lru_cache(maxsize=4096)
def asked_form(text: str) -> str:
    """The text without its polite frame, contractions of question words opened, a question ended by its mark.

    A text of several sentences or lines, and one that asks nothing, stays as it is.
    """
    bare = _CONTRACTION.sub(r"\1 is", text.strip())
    bare = _CLOSING.sub("", _SALUTATION.sub("", bare))
    frame = _FRAME.match(bare)
    if frame:
        bare = bare[frame.end() :].rstrip(_MARKS)
        turned = _EMBEDDED.match(bare)
        if turned:
            bare = f"{turned[1]} {turned[3]} {turned[2]}"
        elif _NAMED.match(bare):
            bare = f"What is {bare}"
    if not _ASKS.match(bare) or re.search(r"[.?!]\s+\w|\n", bare):
        return text
    return bare.rstrip(_MARKS) + "?"
