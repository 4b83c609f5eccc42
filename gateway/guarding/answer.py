"""Look through a whole answer: take out what the policy wants replaced, and hold back a choice that may not pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from backends.attempt import Answer
from backends.openai import chat_body, decode_answer
from gateway.accounting import Accounting
from gateway.guarding.findings import Findings, apply
from gateway.guarding.request import ask_services, guards_of, report
from gateway.guarding.texts import places
from gateway.life import Life
from policies.guards import Guard

if TYPE_CHECKING:
    from gateway.services import Services

HELD_BACK = "content_filter"  # the finish reason of a choice that was held back, in whole or from some point on
_SAID = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call", "audio")
_decode = msgspec.json.Decoder(dict[str, Any]).decode


async def guard_answer(services: Services, life: Life, accounting: Accounting, answer: Answer) -> Answer:
    """The answer as the client may have it; the same one where nothing was found."""
    guards = guards_of(life)
    if guards is None or not guards.after or not answer.completion.choices:
        return answer
    body = _decode(chat_body(answer))
    changed = False
    for choice in body["choices"]:
        findings = await _look_through(services, life, guards.after, choice)
        report(services, life, accounting, "after", findings)
        if findings.denied is not None:
            _hold_back(choice, findings.denied)
            life.meter.finish_reasons[choice.get("index", 0)] = HELD_BACK
        changed = changed or findings.changed or findings.denied is not None
    if not changed:
        return answer
    encoded = msgspec.json.encode(body)
    return Answer(encoded, decode_answer(encoded))


async def _look_through(services: Services, life: Life, guards: tuple[Guard, ...], choice: dict[str, Any]) -> Findings:
    findings = Findings()
    said = choice if choice.get("message") is None else choice["message"]
    texts = list(places(said, _SAID if said is not choice else ("text",)))
    apply([guard for guard in guards if guard.finders], texts, findings)
    asking = [guard for guard in guards if guard.rule.check]
    if asking and texts and findings.denied is None:
        await ask_services(services, life, asking, "after", [place.text for place in texts], findings)
    return findings


def _hold_back(choice: dict[str, Any], guard: Guard) -> None:
    said = guard.rule.message or f"The guardrail '{guard.rule.name}' of the policy held this answer back."
    choice["finish_reason"] = HELD_BACK
    choice["logprobs"] = None
    if choice.get("message") is None:
        choice["text"] = said
    else:
        choice["message"] = {"role": "assistant", "content": said, "refusal": None}
