"""Errors of servers in one form, whatever words they use: that of the OpenAI dialect, with codes to rely on.

It promises that an error object which says that the prompt is too long, or that its content was blocked, carries the
code `CONTEXT_LENGTH` or `CONTENT_POLICY`: another model may be able to answer such a request, and no other 4xx.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

CONTEXT_LENGTH = "context_length_exceeded"
CONTENT_POLICY = "content_policy_violation"
DEADLINE_EXCEEDED = "deadline_exceeded"  # of a bundled engine that was told the request's deadline

# What servers say: few of them have a code for it. Type, code and message are searched as one text.
_WORDS = (
    (
        CONTEXT_LENGTH,
        re.compile(
            r"prompt is too long|context[ _-](?:length|limit|size|window)|maximum model length"
            r"|input token count .{0,40}exceeds the maximum",
            re.IGNORECASE,
        ),
    ),
    (
        CONTENT_POLICY,
        re.compile(
            r"content[ _-](?:filter|policy|management policy)|violat\w+ (?:of )?our usage polic|ResponsibleAIPolicy",
            re.IGNORECASE,
        ),
    ),
)


def recognised(error: Mapping[str, Any]) -> dict[str, Any]:
    """The error object, with one of the two codes if that is what it says.

    A code that is a number is an HTTP status; where it makes room, it goes on as `status`.
    """
    code = error.get("code")
    if code in (CONTEXT_LENGTH, CONTENT_POLICY):
        return dict(error)
    said = f"{error.get('type')} {code} {error.get('message')}"
    for name, words in _WORDS:
        if words.search(said):
            return {"status": code, **error, "code": name} if isinstance(code, int) else {**error, "code": name}
    return dict(error)
