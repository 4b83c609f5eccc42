"""Hand a request to the backends, and put their refusals and failures into the dialect's terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from backends.attempt import Call, NoBackend, UpstreamRefused
from backends.dialect import CannotTranslate
from backends.dispatch import Candidate, Dispatched
from gateway.accounting import Accounting
from gateway.dialects.errors import BadRequest, GatewayError, RateLimited, Unavailable
from gateway.life import Life

if TYPE_CHECKING:
    from gateway.services import Services


async def dispatch(
    services: Services,
    life: Life,
    accounting: Accounting,
    candidates: Sequence[Candidate] | None = None,
    deadline: float | None = None,
) -> Dispatched:
    """Send the request to its candidates, in order, until one has begun to answer.

    Args:
        candidates, deadline: of a further step, in place of the request's own.

    Raises:
        GatewayError: what to tell the client when none did, or when one refused the request itself.
    """
    asked = life.asked
    assert asked is not None
    candidates = candidates or life.candidates
    placement = None
    if services.placing.chooses(candidates):
        placement = await services.measuring.run(life, services.placing.of, life, candidates)
    deadline = life.deadline if deadline is None else deadline
    call = Call(
        payload=asked.payload,
        operation=asked.operation,
        stream=life.stream,
        request_id=life.request_id,
        deadline=deadline,
        extra=lambda candidate: services.extra_fields(candidate, life, deadline),
        native=asked.native,
        headers=native_headers(life) if asked.native is not None else {},
        owner=life.principal.key_id if life.principal else "",
        placement=placement,
    )
    try:
        answer = await services.dispatcher.open(call, candidates, accounting)
    except UpstreamRefused as error:
        raise _refusal(error) from error
    except CannotTranslate as error:
        raise BadRequest(str(error), code="unsupported_parameter", param=error.param) from error
    except NoBackend as error:
        headers = {} if error.retry_after is None else {"retry-after": str(max(1, math.ceil(error.retry_after)))}
        if error.status == 429:
            raise RateLimited(
                "Every backend of this model is rate limited; try again later.",
                code="backend_rate_limited",
                headers=headers,
            ) from error
        raise Unavailable(str(error), status=error.status, code=f"backend_{error.kind}", headers=headers) from error
    life.attempt = answer.attempt  # of two that ran side by side, not always the one that began last
    return answer


def native_headers(life: Life) -> dict[str, str]:
    """Headers that belong to a request in its own dialect: Anthropic's betas change what its body may hold."""
    betas = life.exchange.header(b"anthropic-beta")
    return {} if betas is None else {"anthropic-beta": betas}


def _refusal(error: UpstreamRefused) -> GatewayError:
    """A backend's own 4xx, in its own words; its 401 and 403 concern the gateway's credentials, not the client's."""
    if error.credentials_fault:
        return Unavailable(
            "The backend did not accept the gateway's credentials; tell whoever runs the gateway.",
            status=502,
            code="backend_credentials",
        )
    message, code, kind, param = f"The backend refused the request with status {error.status}.", None, None, None
    if (said := error.said) is not None:
        message = str(said.get("message") or message)
        code, kind, param = (said.get(name) for name in ("code", "type", "param"))
    return BadRequest(
        message,
        status=error.status,
        type=str(kind) if kind else None,
        code=str(code) if code else "backend_refused",
        param=str(param) if param else None,
    )
