"""What a request says of itself to the backends that have several replicas: how long it is, and how it begins.

Where no candidate's backend has a choice, nothing is said and nothing computed. Beginnings are digests with a secret
key; how they are found again is the business of `backends/placement/`.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from backends.dispatch import Candidate
from backends.placement.asked import Placement
from backends.placement.chain import MOST_BYTES, Chain, chained
from backends.pool import Pool
from gateway.access.holds import OutputEstimator
from gateway.dialects.dialect import Asked
from gateway.life import Life
from gateway.settings import Settings

_BYTES_PER_TOKEN: Final = 2  # at most so few: whatever is shorter than a step has no chain, and need not be written out
_encode: Final = msgspec.json.Encoder().encode


class Placing:
    """Knows which backends have a choice. `key`: of digests that other gateways are to know; else the process's own."""

    def __init__(
        self, settings: Settings, pools: Mapping[str, Pool], estimator: OutputEstimator, key: bytes | None = None
    ) -> None:
        placers = {name: pool.placer for name, pool in pools.items() if pool.placer is not None}
        self._backends = frozenset(placers)
        self._by_prefix = frozenset(name for name, placer in placers.items() if placer.index is not None)
        self._salted = frozenset(name for name in settings.backends if salted(settings, name))
        self._estimator = estimator
        self._key = key or secrets.token_bytes(32)

    def chooses(self, candidates: Sequence[Candidate]) -> bool:
        """Whether one of these backends has several replicas."""
        return bool(self._backends) and any(candidate.backend in self._backends for candidate in candidates)

    def of(self, life: Life, candidates: Sequence[Candidate]) -> Placement:
        """What a replica is chosen by. Takes a millisecond per mebibyte of prompt, which ends its look at it."""
        asked, principal = life.asked, life.principal
        assert asked is not None
        first = next(candidate for candidate in candidates if candidate.backend in self._backends)
        output = 0
        if asked.operation in ("chat", "completions") and principal is not None:
            output = self._estimator.estimate(principal.key_id, first.model, asked.max_tokens) * asked.generated
        chain: Chain = ()
        if first.backend in self._by_prefix:
            team = principal.team_id if principal is not None and first.backend in self._salted else ""
            salt = cache_salt(team, asked.payload.get("cache_salt")) if team else ""
            chain = chained(_parts(asked), salt.encode()[:64], self._key, life.input_estimate)
        return Placement(life.input_estimate, output, life.patient, chain)


def salted(settings: Settings, backend: str) -> bool:
    """Whether its servers keep teams' prefixes apart: bundled engines do, and what tells its pages as they do."""
    described = settings.backends[backend]
    return bool(described.engines) or described.placement.prefix == "events"


def cache_salt(team_id: str, given: str | None) -> str:
    """One salt of the team's and the client's, so that no client can name its way into another team's pages."""
    return team_id if given is None else hashlib.sha256(f"{team_id}\n{given}".encode()).hexdigest()


def _without_marks(part: Any) -> Any:
    """A turn without its `cache_control`: clients move that mark on with every turn, and the text is the same."""
    content = part.get("content") if isinstance(part, dict) else None
    if not isinstance(content, list):
        return part
    plain = [
        {name: value for name, value in item.items() if name != "cache_control"} if isinstance(item, dict) else item
        for item in content
    ]
    return {**part, "content": plain}


def _parts(asked: Asked) -> Iterator[bytes]:
    """The prompt in the order in which models read it: tools, then turn by turn; or a text."""
    payload: Mapping[str, Any] = asked.payload
    left = MOST_BYTES
    if asked.operation == "chat":
        tools = payload.get("tools")
        for part in ([tools] if tools else []) + list(asked.messages):
            written = _encode(_without_marks(part))
            yield written
            if (left := left - len(written)) <= 0:
                return
    elif asked.operation == "completions":
        prompt = payload["prompt"]
        if isinstance(prompt, str):
            yield prompt[:left].encode("utf-8", "surrogatepass")
        elif prompt and isinstance(prompt[0], int):
            yield _encode(prompt[: left // _BYTES_PER_TOKEN])
