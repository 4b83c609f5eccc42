"""Watch the answers that models give, to learn from them: JSON where that was asked? asked for again? would a larger
tier have done better?

Most requests are not looked at: nothing is kept of an answer unless its text will be needed, and what is found out is
found out after the client has it. Answers that the policy's own checks have seen (`escalate`) are not checked twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backends.openai import decode_answer
from cache.replay import Collector
from gateway.accounting import Accounting
from gateway.escalating.answers import Said, of_whole
from gateway.escalating.checks import examine
from gateway.ledger.rows import LedgerRow
from gateway.life import Life
from gateway.outcomes.audits import Audits
from gateway.outcomes.retries import Retries, end_user
from policies.schema.escalation import Escalate

if TYPE_CHECKING:
    from gateway.services import Services

Keep = Callable[[bytes], None]

_MOST_BYTES: Final = 1 << 20
_FORM: Final = Escalate(when=("invalid_json", "invalid_tool_call"))
_CUT: Final = ("length", "content_filter")  # by the client's limit or by a guardrail: not the model's whole answer
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Watching:
    """What is watched in a process."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._audits = Audits(services)
        self.retries = Retries()
        services.outcomes.at_intervals(self.retries.sweep)

    def begin(self, life: Life) -> Watch | None:
        """Before the answer is relayed; None where nothing is to be learnt from it."""
        if not self._services.outcomes.learns_from(life) or life.internal:
            return None
        return Watch(self._services, life, self.retries, self._audits)


class Watch:
    """One answer. `keep` what passes, then `end`."""

    def __init__(self, services: Services, life: Life, retries: Retries, audits: Audits) -> None:
        self._services = services
        self._life = life
        self._retries = retries
        self._audits = audits
        self._parts: list[bytes] = []
        self._bytes = 0
        self._checked = self._is_checked()
        self._audited = audits.drawn(life)

    def keeping(self, keep: Keep | None) -> Keep | None:
        """`keep`, and what this needs."""
        if not self._checked and not self._audited:
            return keep
        if keep is None:
            return self._keep

        def both(data: bytes) -> None:
            assert keep is not None
            keep(data)
            self._keep(data)

        return both

    def end(self, accounting: Accounting, of_one_model: bool) -> None:
        """The client has the answer."""
        life = self._life
        row, asked, facts, principal = life.served, life.asked, life.facts, life.principal
        if row is None or asked is None or facts is None or principal is None:
            return
        outcomes = self._services.outcomes
        if (user := end_user(asked.payload)) is not None and (tell := outcomes.teller(life, "retry")) is not None:
            asker, arrived = (principal.key_id, user), life.exchange.received_at
            self._retries.seen(asker, facts.user_text, facts.turns, arrived, tell)
        if of_one_model and self._parts and self._bytes <= _MOST_BYTES:
            self._services.in_background(self._look(accounting, row))

    def _keep(self, data: bytes) -> None:
        self._bytes += len(data)
        if self._bytes <= _MOST_BYTES:
            self._parts.append(data)
        else:
            self._parts.clear()

    def _is_checked(self) -> bool:
        """Whether this answer has a form that can be wrong, and nobody has looked, or looks, but us."""
        life = self._life
        assert life.asked is not None
        assert life.principal is not None
        form = life.asked.payload.get("response_format")
        bound = isinstance(form, dict) and form.get("type") in ("json_object", "json_schema")
        if not bound and not life.asked.payload.get("tools"):
            return False
        seen = life.decision is not None and life.decision.escalate is not None
        return not seen and self._services.outcomes.has_room(life.principal.key_id, "validation")

    async def _look(self, accounting: Accounting, row: LedgerRow) -> None:
        said = self._said()
        if said is None:
            return
        life, outcomes = self._life, self._services.outcomes
        assert life.asked is not None
        if self._checked and not any(choice.finish_reason in _CUT for choice in said):
            form = life.asked.payload.get("response_format")
            if any(choice.calls for choice in said) or isinstance(form, dict):
                found = await examine(_FORM, life.asked, said, None, None, self._services.schemas)
                outcomes.record(life, found.reason is None, "validation", tier=row.tier, model=row.model)
                if found.reason is not None:
                    accounting.note("validation", {"tier": row.tier, "model": row.model, "fault": found.reason})
        if self._audited and len(said) == 1 and not said[0].calls and said[0].finish_reason not in _CUT:
            as_good = await self._audits.compare(life, said[0].text, row.tier)
            if as_good is not None:
                outcomes.record(life, as_good, "audit", tier=row.tier, model=row.model)
                verdict = "as good" if as_good else "worse"
                accounting.note("audit", {"tier": row.tier, "model": row.model, "verdict": verdict})

    def _said(self) -> list[Said] | None:
        """The choices of the answer; None where it cannot be put together."""
        if not self._life.stream:
            return of_whole(decode_answer(self._parts[0]))
        collector = Collector()
        for part in self._parts:
            collector.add(_decode(part))
        answer = collector.answer()
        return None if answer is None else of_whole(decode_answer(msgspec.json.encode(answer)))
