"""Which tokens may come next: one request's way through its grammar."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance

from engine.types import Bitmask, GrammarFailed


class GrammarState:
    """`engine.types.TokenMasks` over a matcher of llguidance."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> GrammarState:
        """The same state for another request."""
        return GrammarState(self._matcher.deep_copy())

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped()

    def fill(self, drafts: Sequence[int], out: Bitmask) -> int:
        matcher = self._matcher
        ahead = 0
        try:
            for row, draft in enumerate([*drafts, None]):
                matcher.unsafe_compute_mask_ptr(out[row].ctypes.data, out.strides[0])
                self._check()
                if draft is None or not matcher.try_consume_tokens([draft]):
                    return row + 1
                ahead += 1
        finally:
            if ahead:
                matcher.rollback(ahead)
        raise AssertionError("the last round returns")

    def accept(self, token_ids: Sequence[int]) -> None:
        matcher = self._matcher
        taken = matcher.try_consume_tokens(list(token_ids))
        self._check()
        if taken < len(token_ids):
            raise GrammarFailed(f"the grammar does not allow token {token_ids[taken]} here")

    def _check(self) -> None:
        """Raise GrammarFailed where the library has given up: going on takes more work than its bounds allow."""
        if self._matcher.is_error():
            reason = self._matcher.get_error().splitlines()[0]
            raise GrammarFailed(f"the grammar is too complex to go on with: {reason}")
