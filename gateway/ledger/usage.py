"""What one attempt used, in one form for every dialect: cached input and cache writes are part of the input.

Vendors disagree on whether the whole contains its parts. Here it always does, and `Usage` refuses anything else, so
no later code can charge a token twice or compute a negative count.
"""

from __future__ import annotations

import logging
from typing import Final, Literal

import msgspec

from backends import protocol

logger = logging.getLogger("tierline.ledger")

# reported: by the server that did the work. counted: by the gateway, from what was delivered. estimated: before it ran.
UsageSource = Literal["reported", "counted", "estimated"]


# No request has more tokens of a kind. A larger count would not fit into the ledger as money, or not into its sums.
MOST_TOKENS: Final = 2**31 - 1


class InvalidUsage(ValueError):
    """Token counts that contradict each other."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one attempt.

    `0 <= cached_input_tokens + cache_write_tokens <= input_tokens` and `0 <= reasoning_tokens <= output_tokens`.

    Raises:
        InvalidUsage: the counts break these bounds.
    """

    input_tokens: int
    output_tokens: int
    cached_input_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    source: UsageSource = "reported"

    def __post_init__(self) -> None:
        cached, written = self.cached_input_tokens, self.cache_write_tokens
        if cached >= 0 and written >= 0 and cached + written <= self.input_tokens:  # noqa: SIM102
            if 0 <= self.reasoning_tokens <= self.output_tokens:
                return
        if min(self.input_tokens, self.output_tokens, cached, written, self.reasoning_tokens) < 0:
            raise InvalidUsage(f"a token count is negative: {self}")
        if cached + written > self.input_tokens:
            raise InvalidUsage(f"cached input and cache writes exceed the input: {self}")
        raise InvalidUsage(f"reasoning tokens exceed the output: {self}")

    @property
    def fresh_input_tokens(self) -> int:
        """Input that was neither read from nor written to the server's prompt cache."""
        return self.input_tokens - self.cached_input_tokens - self.cache_write_tokens

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens


ZERO = Usage(input_tokens=0, output_tokens=0)


def from_openai(reported: protocol.Usage | None, fallback: Usage | None = None) -> Usage | None:
    """Normalise what a server reported; an explicit zero is a report, an absent count is not.

    A count the server left out is derived from `total_tokens` where possible, else taken from `fallback`, whose source
    the result then carries. Contradictions are resolved so that nothing is lost: a part that exceeds its whole was
    evidently counted beside it and is added; a negative count becomes zero. A report of more than `MOST_TOKENS` is not
    believed at all. All three are logged.

    Returns:
        The usage, or `fallback` (possibly None) when the server reported nothing usable.
    """
    if reported is None:
        return fallback
    input_tokens, output_tokens, total = reported.prompt_tokens, reported.completion_tokens, reported.total_tokens
    if total is not None:
        if output_tokens is None and input_tokens is not None:
            output_tokens = total - input_tokens
        elif input_tokens is None and output_tokens is not None:
            input_tokens = total - output_tokens
    source: UsageSource = "reported"
    if input_tokens is None or output_tokens is None:
        if fallback is None or (input_tokens is None and output_tokens is None):
            return fallback
        source = fallback.source
        input_tokens = fallback.input_tokens if input_tokens is None else input_tokens
        output_tokens = fallback.output_tokens if output_tokens is None else output_tokens
    prompt, completion = reported.prompt_tokens_details, reported.completion_tokens_details
    cached = (prompt.cached_tokens if prompt else None) or 0
    written = (prompt.cache_creation_tokens if prompt else None) or 0
    reasoning = (completion.reasoning_tokens if completion else None) or 0
    if max(input_tokens, output_tokens, cached, written, reasoning) > MOST_TOKENS:
        logger.warning("a server reported more tokens than any request has, not believed: %s", reported)
        return fallback
    if min(input_tokens, output_tokens, cached, written, reasoning) < 0:
        logger.warning("a server reported a negative token count, taken as zero: %s", reported)
        input_tokens, output_tokens = max(0, input_tokens), max(0, output_tokens)
        cached, written, reasoning = max(0, cached), max(0, written), max(0, reasoning)
    if cached + written > input_tokens:
        logger.warning("a server counts cached input beside its input, added: %s", reported)
        input_tokens += cached + written
    # Some servers keep reasoning out of `completion_tokens` and show it only in the total.
    apart = reported.prompt_tokens is not None and total == input_tokens + output_tokens + reasoning
    if reasoning and (apart or reasoning > output_tokens):
        output_tokens += reasoning
    return Usage(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_input_tokens=cached,
        cache_write_tokens=written,
        reasoning_tokens=reasoning,
        source=source,
    )
