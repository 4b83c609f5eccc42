"""The checks of an answer: each says of one choice whether it fails. An answer fails if one of its choices does.

Where several fail, the gravest is the reason. What cannot be told (no log-probabilities came, a schema is too costly)
does not fail: only what is known to be wrong is worth another model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backends.protocol import Usage
from gateway.dialects.dialect import Asked
from gateway.escalating.answers import Said
from gateway.escalating.confidence import Curve, features
from gateway.escalating.refusals import refuses
from gateway.escalating.schemas import Schemas
from policies.schema.escalation import Check, Escalate

if TYPE_CHECKING:
    from backends.protocol import ToolCall

# From the gravest to the least: of answers that fail, the one that fails least is given.
GRAVITY: Final[tuple[Check, ...]] = (
    "empty",
    "invalid_json",
    "invalid_tool_call",
    "refusal",
    "truncated",
    "low_confidence",
)
_SHORT: Final = 1 << 16  # characters
MOST_JSON_CHARACTERS: Final = 1 << 20  # a longer text is not parsed

_decode = msgspec.json.Decoder().decode


class Found(msgspec.Struct, frozen=True):
    """What the checks found: why the answer fails, None if it passes; and how likely it is right, where that is known:
    a probability by the model's curve, else the mean log-probability."""

    reason: Check | None
    confidence: float | None = None

    @property
    def gravity(self) -> int:
        """The greater, the worse; 0 for an answer that passes."""
        return 0 if self.reason is None else len(GRAVITY) - GRAVITY.index(self.reason)


async def examine(
    escalate: Escalate, asked: Asked, answer: Sequence[Said], usage: Usage | None, curve: Curve | None, schemas: Schemas
) -> Found:
    """Check every choice of an answer."""
    confidence = _confidence(escalate, answer, curve)
    for check in GRAVITY:
        if check not in escalate.when:
            continue
        match check:
            case "empty":
                failed = not answer or any(_is_empty(said) for said in answer)
            case "truncated":
                failed = any(said.finish_reason == "length" for said in answer) and not _own_limit(asked, usage)
            case "refusal":
                failed = any(_refuses(said) for said in answer)
            case "invalid_json":
                failed = await _invalid_json(asked.payload.get("response_format"), answer, schemas)
            case "invalid_tool_call":
                failed = await _invalid_call(asked.payload.get("tools"), answer, schemas)
            case "low_confidence":
                least = escalate.confidence if escalate.mean_logprob is None else escalate.mean_logprob
                failed = confidence is not None and confidence < least
        if failed:
            return Found(check, confidence)
    return Found(None, confidence)


def _is_empty(said: Said) -> bool:
    return not said.calls and not said.text.strip() and not said.refusal


def _own_limit(asked: Asked, usage: Usage | None) -> bool:
    """Whether the limit that cut the answer was the client's: then every model is cut there.

    Of several choices only the sum is known; below one choice's limit, none has reached its own.
    """
    limit = asked.max_tokens
    if limit is None:
        return False
    written = usage.completion_tokens if usage is not None else None
    return written is None or written >= limit


def _refuses(said: Said) -> bool:
    if said.refusal or said.finish_reason == "content_filter":
        return True
    return not said.calls and refuses(said.text)


async def _invalid_json(form: Any, answer: Sequence[Said], schemas: Schemas) -> bool:
    """Whether JSON was asked for and a choice is none, or none of that schema."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind not in ("json_object", "json_schema"):
        return False
    described = form.get("json_schema")
    schema = described.get("schema") if kind == "json_schema" and isinstance(described, dict) else None
    for said in answer:
        if said.calls or len(said.text) > MOST_JSON_CHARACTERS:
            continue
        try:
            value = await _parsed(said.text)
        except (msgspec.DecodeError, RecursionError):
            return True
        if kind == "json_object" and not isinstance(value, dict):
            return True
        if isinstance(schema, dict) and await schemas.fits(schema, value) is False:
            return True
    return False


async def _invalid_call(tools: Any, answer: Sequence[Said], schemas: Schemas) -> bool:
    """Whether a choice calls a tool that was not offered, or with arguments that its schema does not allow."""
    offered = _functions(tools)
    if not offered:
        return False
    for said in answer:
        for call in said.calls:
            if await _is_invalid(call, offered, schemas):
                return True
    return False


async def _is_invalid(call: ToolCall, offered: Mapping[str, Any], schemas: Schemas) -> bool:
    function = call.function
    if function is None or function.name is None or function.name not in offered:
        return True
    written = function.arguments or ""
    if len(written) > MOST_JSON_CHARACTERS:
        return False
    try:
        value = await _parsed(written) if written.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return True
    if not isinstance(value, dict):
        return True
    schema = offered[function.name]
    return isinstance(schema, dict) and await schemas.fits(schema, value) is False


async def _parsed(text: str) -> Any:
    """The value of a JSON text; a long one is read beside the event loop."""
    return _decode(text) if len(text) <= _SHORT else await asyncio.to_thread(_decode, text)


def _functions(tools: Any) -> dict[str, Any]:
    """The schemas of the functions that were offered, by name."""
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return {str(f.get("name")): f.get("parameters") for f in functions if isinstance(f, dict)}


def _confidence(escalate: Escalate, answer: Sequence[Said], curve: Curve | None) -> float | None:
    """Of the choice that is least sure; None where no choice can be judged. A call of a tool has no token to judge."""
    if not escalate.asks_confidence:
        return None
    judged = [said.tokens for said in answer if said.tokens and not said.calls]
    if escalate.mean_logprob is not None:
        return min((features(tokens)[0] for tokens in judged), default=None)
    return None if curve is None else min((curve.probability(tokens) for tokens in judged), default=None)
