"""What the cache keeps: one finished answer with its price and its time limits."""

from __future__ import annotations

import time

import msgspec


class Entry(msgspec.Struct, frozen=True):
    """An answer that was served once and may be served again.

    Attributes:
        id: unique; the id of the request that produced the answer.
        answer: the original `chat.completion` object as canonical JSON (see `replay.canonical_answer`).
        model, tier: who answered.
        prompt_tokens, completion_tokens: what the original answer used.
        cost_nanousd: what the original answer cost, so that a hit can say what it saved.
        created_at, expires_at: Unix time in seconds. The limit is absolute: a hit never extends it.
        question: the last user text that was answered, which a semantic match is verified against.
        tags: words that name it for purging, such as a document it speaks of.
        policy: name of the policy under which it was stored.
    """

    id: str
    answer: bytes
    model: str
    tier: str
    prompt_tokens: int
    completion_tokens: int
    cost_nanousd: int
    created_at: float
    expires_at: float
    question: str
    tags: tuple[str, ...] = ()
    policy: str = ""

    def size_bytes(self) -> int:
        """Bytes charged against the bound of the cache, without the vectors and the other questions."""
        words = len(self.model) + len(self.tier) + len(self.id) + len(self.policy) + sum(map(len, self.tags))
        return len(self.answer) + len(self.question.encode()) + words + 256

    def expired(self, now: float | None = None, *, ttl_s: float | None = None) -> bool:
        """Whether the entry is past its own limit, or older than `ttl_s` where the asker is stricter."""
        now = time.time() if now is None else now
        return now >= self.expires_at or (ttl_s is not None and now - self.created_at >= ttl_s)
