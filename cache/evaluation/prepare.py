"""Texts as the cache sees them: how each may be looked up, and its vector."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from cache.eligibility import Mode, check
from cache.embedding.embedder import Refused, Vectors
from cache.words.asking import asked_form

_BATCH = 32


class TextEmbedder(Protocol):
    """What evaluation needs of an `Embedder`."""

    name: str
    dimension: int
    scripts: frozenset[str]

    def check(self, text: str) -> None: ...

    def embed(self, texts: list[str]) -> Vectors: ...


class Prepared(msgspec.Struct, frozen=True):
    """How a text may be looked up, why no better, and its vector [dimension] where that is `semantic`."""

    mode: Mode
    reason: str | None = None
    vector: Vectors | None = None


def prepare(embedder: TextEmbedder, texts: Iterable[str], *, admit_all: bool = False) -> dict[str, Prepared]:
    """Every text by itself. `admit_all` leaves out the rules of eligibility, so that what they cost can be told."""
    prepared: dict[str, Prepared] = {}
    fuzzy: list[str] = []
    for text in dict.fromkeys(texts):
        request = {"messages": [{"role": "user", "content": text}]}
        eligible = check(request, mode="semantic", allow_temperature=0.0, scripts_covered=embedder.scripts)
        prepared[text] = Prepared(eligible.mode, eligible.reason)
        if admit_all or eligible.mode == "semantic":
            try:
                embedder.check(asked_form(text))
                fuzzy.append(text)
            except Refused as refusal:
                prepared[text] = Prepared("exact", refusal.reason)
    # Texts of like length together: a batch costs as much as its longest.
    fuzzy.sort(key=len)
    for start in range(0, len(fuzzy), _BATCH):
        batch = fuzzy[start : start + _BATCH]
        for text, vector in zip(batch, embedder.embed([asked_form(text) for text in batch]), strict=True):
            prepared[text] = Prepared("semantic", None, vector)
    return prepared
