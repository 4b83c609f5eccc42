"""Ask a service whether texts may pass (`check` of a guardrail).

It gets `{"request_id", "policy", "rule", "when", "team", "texts"}` and answers `{"verdict": "allow"}` or
`{"verdict": "deny"}`, with a `reason` for the record if it likes (one word). Whatever else it does (errors, silence,
something that is no verdict) counts as the rule's `on_error` says.
"""

from __future__ import annotations

import logging
import os
import re
import time
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

import msgspec

from backends.connection import HttpFailure, Origin
from gateway.guarding.findings import Side
from policies.schema.guardrails import HttpCheck

if TYPE_CHECKING:
    from gateway.life import Life
    from gateway.services import Services

logger = logging.getLogger("tierline.guarding")

MOST_ANSWER_BYTES: Final = 64 * 1024
_REASON: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Verdict(msgspec.Struct):
    verdict: Literal["allow", "deny"]
    reason: str = ""


_decode = msgspec.json.Decoder(Verdict).decode


class Checks:
    """The services that policies name, with their connections."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._origins: dict[str, Origin] = {}

    async def denies(self, check: HttpCheck, rule: str, side: Side, life: Life, texts: list[str]) -> str | None:
        """Why the texts may not pass; None where they may."""
        try:
            found = await self._ask(check, rule, side, life, texts)
        except (HttpFailure, msgspec.DecodeError, UnicodeError, ValueError) as error:
            logger.warning("the check of guardrail '%s' gave no verdict: %s", rule, error)
            self._services.metrics.guardrails.labels(_policy(life), rule, side, "no_verdict").inc()
            return "no_verdict" if check.on_error == "deny" else None
        if found.verdict == "allow":
            return None
        return found.reason if _REASON.fullmatch(found.reason) else "denied"

    async def _ask(self, check: HttpCheck, rule: str, side: Side, life: Life, texts: list[str]) -> Verdict:
        origin = self._origin(check.url)
        body = msgspec.json.encode(
            {
                "request_id": life.request_id,
                "policy": _policy(life),
                "rule": rule,
                "when": side,
                "team": life.principal.team_name if life.principal else "",
                "texts": texts,
            }
        )
        deadline = time.monotonic() + check.timeout_ms / 1000
        if life.deadline is not None:
            deadline = min(deadline, life.deadline)
        request = _head(origin, check, len(body)) + body
        exchange = await self._services.http.send(origin, request, connect_s=check.timeout_ms / 1000, deadline=deadline)
        try:
            answer = await exchange.read_all(MOST_ANSWER_BYTES)
            if exchange.status != 200:
                raise ValueError(f"it answered with status {exchange.status}")
        finally:
            exchange.close()
        return _decode(answer)

    def _origin(self, url: str) -> Origin:
        origin = self._origins.get(url)
        if origin is None:
            if len(self._origins) >= 100:  # of policies that have been edited since
                self._origins.clear()
            origin = self._origins[url] = Origin(url)
        return origin


def _head(origin: Origin, check: HttpCheck, length: int) -> bytes:
    parts = urlsplit(check.url)
    lines = [
        f"POST {parts.path or '/'} HTTP/1.1",
        f"host: {origin.authority}",
        "content-type: application/json",
        "accept: application/json",
        f"content-length: {length}",
    ]
    if check.token_env:
        token = os.environ.get(check.token_env, "")
        if not token or not (token.isascii() and token.isprintable()):
            raise ValueError(f"the environment variable {check.token_env} holds no token")
        lines.append(f"authorization: Bearer {token}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _policy(life: Life) -> str:
    return life.decision.policy if life.decision else ""
