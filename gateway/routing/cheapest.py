"""For requests whose answer may come late: of the models that would do equally well, the one that costs least first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from backends.dispatch import Candidate
from gateway.ledger.prices import PriceBook, estimate

# The length of an answer where the request does not say how long it may be.
_USUAL_OUTPUT: Final = 512


def cheapest_first(
    prices: PriceBook, candidates: Sequence[Candidate], input_tokens: int, output_tokens: int | None, *, batch: bool
) -> list[Candidate]:
    """The candidates with those of one tier by price. The order of tiers stays, and what is likely to be too short for
    the prompt stays behind."""

    def alike(candidate: Candidate) -> tuple[str, bool]:
        return candidate.tier, input_tokens < candidate.context_length

    def price(candidate: Candidate) -> int:
        return estimate(prices.price_for(candidate.model, batch=batch), input_tokens, output_tokens or _USUAL_OUTPUT)

    return [candidate for _, group in groupby(candidates, alike) for candidate in sorted(group, key=price)]
