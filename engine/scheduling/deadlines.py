"""Which requests are too late: their deadline has passed, or passes for certain before they can have an answer.

Whether an answer comes in time is not known in advance: nobody knows its length or who else will come. What is known
is the least that is still to be done: the rest of the prompt, then one step for each token that has to come. If not
even that fits, alone in the engine and at twice the pace of late, the request ends before it costs others a step.
"""

from __future__ import annotations

from engine.scheduling.request import Request, RequestStatus
from engine.spec.pace import StepCost

# Measured times are those of a moment: so much faster it may be this time.
_HOPE = 2.0


def too_late(request: Request, now: float, max_step_tokens: int, cost: StepCost) -> str | None:
    """Why a request with a deadline cannot keep it, for its client; None: it may.

    now: `time.monotonic()`. max_step_tokens: of a prompt in one step, at most.
    """
    assert request.deadline is not None
    left = request.deadline - now
    if left <= 0:
        return f"The request's deadline passed {_how_far(request)}."
    if not cost.is_known:
        return None
    prompt = request.num_tokens - request.num_computed_tokens
    if request.status is RequestStatus.WAITING:  # after a preemption most of it may still be in the cache
        prompt = 1 if request.num_preemptions else request.expected_prefill
    steps, rest = divmod(prompt, max_step_tokens)
    seconds = steps * cost.seconds(max_step_tokens) + (cost.seconds(rest) if rest else 0.0)
    more = max(0, request.params.min_tokens - request.num_generated_tokens - 1)
    seconds += more * cost.seconds(1)
    if seconds <= _HOPE * left:
        return None
    and_more = f" and {more} more that it asks for" if more else ""
    return (
        f"The request cannot keep its deadline, {_ms(left)} from now: computing {_tokens(prompt)} before its next "
        f"one{and_more} takes about {_ms(seconds)} here. That was found {_how_far(request)}."
    )


def _how_far(request: Request) -> str:
    if request.num_generated_tokens:
        return f"after {_tokens(request.num_generated_tokens)} of the answer"
    if request.num_cached_tokens is None:
        return "while it waited for its turn; nothing was computed"
    return f"when {request.num_computed_tokens} of {_tokens(request.num_prompt_tokens)} of its prompt were there"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
