"""Look through a request before anything of it leaves for the cache or a model."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from gateway.accounting import Accounting
from gateway.dialects.errors import BadRequest
from gateway.guarding.findings import Findings, Side, apply, as_notes
from gateway.guarding.texts import Parts, Place, places
from gateway.life import Life
from policies.guards import Guard, Guards

if TYPE_CHECKING:
    from gateway.services import Services


def guards_of(life: Life) -> Guards | None:
    """The guardrails that count for a request."""
    return None if life.policy is None else life.policy.guards


async def guard_request(services: Services, life: Life, accounting: Accounting) -> None:
    """Deny, or replace what the policy wants replaced, in the request itself: cache, backend and memory get no other.

    Raises:
        BadRequest: `content_blocked`.
    """
    guards = guards_of(life)
    if guards is None:
        return
    asked = life.asked
    assert asked is not None
    if guards.after and (asked.payload.get("logprobs") or asked.payload.get("top_logprobs")):
        text = "The policy looks through answers, and log-probabilities would say what it takes out of them."
        raise BadRequest(f"'logprobs' is not available: {text}", code="unsupported_parameter", param="logprobs")
    if not guards.before:
        return
    findings = Findings()
    await services.measuring.run(life, partial(_look_through, life, guards.before, findings))
    if findings.changed and asked.memory is not None:
        asked.memory.changed()
    if findings.denied is None:
        await _ask_services(services, life, guards.before, findings)
    report(services, life, accounting, "before", findings)
    if (guard := findings.denied) is not None:
        said = guard.rule.message or f"The guardrail '{guard.rule.name}' of the policy does not let this request pass."
        raise BadRequest(said, code="content_blocked", param=asked.input_field)


def report(services: Services, life: Life, accounting: Accounting, side: Side, findings: Findings) -> None:
    """Count what was found, and put it on record: which rule found how often what kind, never what it was."""
    assert life.decision is not None
    for note in as_notes(findings, side):
        services.metrics.guardrails.labels(life.decision.policy, note["rule"], side, note["action"]).inc()
        accounting.note("guardrail", note)


def _look_through(life: Life, guards: tuple[Guard, ...], findings: Findings) -> None:
    for guard in guards:
        most = guard.rule.max_tokens
        if most is not None and life.input_estimate > most:
            findings.add(guard, ["max_tokens"])
            if guard.rule.action == "deny":
                findings.denied = guard
                return
    apply([guard for guard in guards if guard.finders], _texts(life), findings)


def _texts(life: Life) -> list[Place | Parts]:
    """Every text of the request, in the form that backends get and in that of the client; and what is remembered."""
    asked = life.asked
    assert asked is not None
    found = list(places(asked.payload))
    if asked.native is not None:
        found += places(asked.native.payload)
    if asked.memory is not None:
        found += places({"input": list(asked.memory.items)}, ("input",))
    if asked.messages is not asked.payload.get("messages"):
        found += places({"messages": list(asked.messages)}, ("messages",))
    return found


async def _ask_services(services: Services, life: Life, guards: tuple[Guard, ...], findings: Findings) -> None:
    """Ask the services of all rules at once, about the texts as they will be sent."""
    asking = [guard for guard in guards if guard.rule.check]
    if not asking:
        return
    asked = life.asked
    assert asked is not None
    texts = [place.text for place in places(asked.payload)]
    await ask_services(services, life, asking, "before", texts, findings)


async def ask_services(
    services: Services, life: Life, asking: list[Guard], side: Side, texts: list[str], findings: Findings
) -> None:
    """Ask the services of these rules at once; the first rule in their order that denies counts."""
    whys = await asyncio.gather(
        *(services.checks.denies(g.rule.check, g.rule.name, side, life, texts) for g in asking if g.rule.check)
    )
    for guard, why in zip(asking, whys, strict=True):
        if why is not None:
            findings.add(guard, [why])
            if guard.rule.action == "deny":
                findings.denied = guard
                return
