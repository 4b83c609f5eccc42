"""What the gateway's log says of edited policies and of those that are taken back by themselves, and how `tierline up`
hears it, to say it on the terminal.

Whoever edits a policy looks at the terminal or at the policy, not into `log/gateway.log`: a refused edit that only the
log knows of looks like one that counts.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

REFUSED: Final = "policies refused, the last good set stays in force: "
IN_FORCE: Final = "policies in force, version "
_ROLLOUT: Final = re.compile(r"policy \S+ is (?:rolled back to .+|tried again)")
_TEXT: Final = re.compile(r"\S+ (?:error|info) +(polic(?:ies|y) .+)")


class _JsonLine(msgspec.Struct):
    event: str = ""


_decoder = msgspec.json.Decoder(_JsonLine)


class PolicyNews:
    """Called with each line of the gateways' logs: the sentence that is news, or None. Several gateways that share a
    folder say the same at about the same time; it is news once."""

    def __init__(self) -> None:
        self._refused: set[str] = set()
        self._in_force = ""
        self._rolled_back: dict[str, str] = {}  # by policy and version, what was said last

    def __call__(self, line: str) -> str | None:
        event = _event(line)
        if event is None:
            return None
        if event.startswith(REFUSED):
            known = event in self._refused
            self._refused.add(event)
            return None if known else event
        if _ROLLOUT.match(event):
            name = event.split()[1]
            known = self._rolled_back.get(name) == event
            self._rolled_back[name] = event
            return None if known else event
        if event == self._in_force and not self._refused:
            return None
        self._refused.clear()
        self._in_force = event
        return event


def _event(line: str) -> str | None:
    """What a line of the log, as text or JSON, says of policies."""
    if "policies " not in line and "policy " not in line:
        return None
    if line.startswith("{"):
        try:
            event = _decoder.decode(line).event
        except (msgspec.DecodeError, UnicodeEncodeError):
            return None
    else:
        found = _TEXT.match(line)
        event = found[1] if found else ""
    return event if event.startswith((REFUSED, IN_FORCE)) or _ROLLOUT.match(event) else None
