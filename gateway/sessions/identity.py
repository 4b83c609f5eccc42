"""Which conversation a request belongs to: what the client says, else how the conversation begins.

The id is keyed by the server secret and holds the API key and the policy, so it tells nothing of what was written, and
no client can name its way into another's conversation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gateway.access.secret import ServerSecret
from gateway.dialects.errors import BadRequest
from policies.schema.session import SessionPolicy, SessionSource
from tiers.features import text_of

if TYPE_CHECKING:
    from gateway.life import Life

_HEADER: Final = re.compile(r"[\x20-\x7e]{1,200}")
# Of long texts their beginning and their length: hashing must not take long.
_READ: Final = 8192
_OPENING: Final = frozenset({"system", "developer", "user"})


class Identity(msgspec.Struct, frozen=True):
    """A conversation. `begins`: it has no earlier turn, so there is nothing to look for. `also` is a further id, by
    which a later turn may name it."""

    id: str
    source: SessionSource
    begins: bool = False
    also: str | None = None


def identify(life: Life, policy: str, session: SessionPolicy, secret: ServerSecret) -> Identity | None:
    """The conversation of a request, by the first of the policy's sources that it has; None: it has none of them.

    Raises:
        BadRequest: the header is not text that can name one.
    """
    assert life.principal is not None
    key_id = life.principal.key_id

    def digest(source: SessionSource, *parts: str) -> str:
        return secret.digest("\0".join(("session", key_id, policy, source, *parts)))[:32]

    for source in session.by:
        if source == "beginning":
            opening = _opening(life.asked.messages if life.asked else ())
            if opening is None:
                continue
            parts, begins = opening
            also = None
            if begins and life.conversation is not None and "previous_response_id" in session.by:
                also = digest("previous_response_id", life.conversation)
            return Identity(digest(source, *parts), source, begins, also)
        named = _named(life, source)
        if named is not None:
            return Identity(digest(source, named), source)
    return None


def _named(life: Life, source: SessionSource) -> str | None:
    """What the request says of it by this source."""
    asked = life.asked
    assert asked is not None
    if source == "header":
        header = life.exchange.header(b"x-tierline-session")
        if header is not None and not (_HEADER.fullmatch(header) and header.strip()):
            raise BadRequest(
                "'x-tierline-session' must be 1 to 200 printable ASCII characters, such as a UUID.",
                code="invalid_session",
            )
        return header
    if source == "previous_response_id":
        # Known also of a first turn, whose own answer begins the conversation: that one is found by how it begins.
        return life.conversation if asked.memory is not None and asked.memory.previous is not None else None
    value: Any = asked.metadata.get("session_id") if source == "session_id" else asked.payload.get(source)
    return value if isinstance(value, str) and value else None


def _opening(messages: Sequence[Mapping[str, Any]]) -> tuple[list[str], bool] | None:
    """The texts before the first answer, and whether none has been given yet; None without a message of a user."""
    parts: list[str] = []
    users = 0
    for message in messages:
        role = message.get("role")
        if role not in _OPENING or (role == "user" and users):
            break
        users += role == "user"
        text = text_of(message)
        parts += (str(role), str(len(text)), text[:_READ])
    if not users:
        return None
    return parts, all(message.get("role") in _OPENING for message in messages)
