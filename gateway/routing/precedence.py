"""What a bundled engine is told of a request beside its text: whose it is, how urgent, and until when it matters."""

from __future__ import annotations

import time
from typing import Any, Final

from gateway.life import Life

PATIENT_PRIORITY: Final = 10  # steps back of what nobody waits for: batches, and requests of the tier "flex"
_MOST: Final = 100  # the engine's bound, in both directions


def precedence(life: Life, deadline: float | None) -> dict[str, Any]:
    """The engine's fields. `deadline`: of this attempt, `time.monotonic()`.

    The policy says how urgent its requests are. Those that nobody waits for step back, and so may a client by its own
    `priority`; it cannot push ahead: below 0 counts as 0. One that is no number is left for the engine to refuse.
    """
    assert life.asked is not None
    fields: dict[str, Any] = {}
    if life.principal is not None:
        fields["tenant"] = life.principal.team_id
    own = life.asked.payload.get("priority")
    if isinstance(own, float) and own.is_integer():
        own = int(own)  # as the engine reads it
    if own is None or (isinstance(own, int) and not isinstance(own, bool)):
        given = 0 if life.policy is None else life.policy.document.priority
        fields["priority"] = min(_MOST, given + PATIENT_PRIORITY * life.patient + max(0, own or 0))
    if deadline is not None:
        fields["deadline_ms"] = max(1, int((deadline - time.monotonic()) * 1000))
    return fields
