"""Ask a model something of the gateway's own about a request: beside it, never in its way.

Such a question goes the way of any request, under the key, team and policy of the one that it is about: it has ledger
rows, tagged with that request's id, and counts against budgets, though not against requests and tokens per minute,
which are the client's. What the key may use is no matter: the policy asks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from backends.protocol import ChatCompletion
from gateway.access.principal import Principal
from gateway.accounting import Accounting
from gateway.admission import admit
from gateway.dialects.dialect import Asked
from gateway.dialects.errors import GatewayError
from gateway.dialects.openai_chat import CHAT
from gateway.dispatching import dispatch
from gateway.finish import outcome_of
from gateway.http import Exchange
from gateway.life import Life
from gateway.routing.candidates import select
from policies.evaluate import Decision
from policies.load import Policy
from tiers.features import estimate_prompt_tokens

if TYPE_CHECKING:
    from gateway.services import Services

PATIENCE_S: Final = 60.0


class Origin(msgspec.Struct, frozen=True):
    """The request that is asked about: whose it is, and what was decided for it."""

    request_id: str
    principal: Principal
    policy: Policy
    decision: Decision
    tags: dict[str, str]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A chat that a tier is asked. `rule` and `why` are those of its decision, `tag` names the request it is about.

    `needs` are capabilities that the model must have.
    """

    payload: Mapping[str, Any]
    tier: str
    most_tokens: int | None
    rule: str
    why: str
    tag: str
    needs: Mapping[str, str] = {}


def origin_of(life: Life) -> Origin:
    """Where questions about this request come from; it must have been decided."""
    assert life.principal is not None
    assert life.policy is not None
    assert life.decision is not None
    return Origin(life.request_id, life.principal, life.policy, life.decision, life.tags)


async def ask_aside(services: Services, origin: Origin, question: Question) -> ChatCompletion:
    """The answer of the first model of the tier that gives one.

    Raises:
        GatewayError: it cannot be asked, or did not answer.
    """
    life = Life(exchange := _nobodys_exchange(), CHAT, exchange.request_id, internal=True)
    life.principal = replace(origin.principal, allowed_models=None, allowed_tiers=None, allowed_routes=None)
    life.tags = {**origin.tags, question.tag: origin.request_id}
    life.deadline = time.monotonic() + PATIENCE_S
    life.policy = origin.policy
    life.decision = replace(
        origin.decision,
        tier=question.tier,
        model=None,
        requested_tier=question.tier,
        rule=question.rule,
        rule_index=None,
        why=question.why,
        fallback_tiers=(),
        fallback_reason=None,
        escalate=None,
        auto=None,
        quality_target=None,
    )
    messages = question.payload["messages"]
    life.input_estimate = estimate_prompt_tokens(messages)
    limit = None if question.most_tokens is None else ("max_tokens", question.most_tokens)
    found = select(services.settings, life.decision, question.needs, life.input_estimate, limit, life.principal)
    life.candidates = found.candidates
    model = life.candidates[0].model
    payload = {**question.payload, "model": model}
    if question.most_tokens is not None:
        payload["max_tokens"] = question.most_tokens
    life.asked = Asked(
        operation="chat", model=model, payload=payload, messages=messages, output_limit=limit, needs=question.needs
    )
    accounting = Accounting(services, life)
    try:
        await admit(services, life)
        answer = await dispatch(services, life, accounting)
        try:
            assert answer.whole is not None
            life.meter.see_whole(answer.whole.completion)
            return answer.whole.completion
        finally:
            await answer.aclose()
    except GatewayError as error:
        life.error = error
        raise
    except asyncio.CancelledError:
        life.exchange.gone = True
        raise
    finally:
        await accounting.settle(*outcome_of(life))


def _nobodys_exchange() -> Exchange:
    """An exchange without a client, for what the gateway asks itself."""

    async def nothing(*_: Any) -> Any:
        raise RuntimeError("there is no client here")

    return Exchange({"type": "http", "method": "POST", "path": "/", "headers": []}, nothing, nothing)
