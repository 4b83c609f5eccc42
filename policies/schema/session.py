"""Whether conversations stay on the tier and the model that they began with."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from policies.schema.base import Strict, seconds

SessionSource = Literal["header", "session_id", "prompt_cache_key", "previous_response_id", "beginning"]


def _pin(value: Any) -> float | None:
    """Older readers of YAML take a bare `off` for false; here both mean it."""
    if value in ("off", False, None):
        return None
    try:
        return seconds(value)
    except ValueError as error:
        raise ValueError(f"{error}; or it is off") from None


class SessionPolicy(Strict):
    """Conversations stay where they are: a switch costs the prompt cache, and the prompt is read anew."""

    pin: Annotated[
        float | None,
        BeforeValidator(_pin, json_schema_input_type=Annotated[str, Field(pattern=r"^(off|[1-9][0-9]*(s|m|h|d|w))$")]),
    ] = Field(3600.0, description="How long after its last turn a conversation keeps its tier and model; off: never.")
    by: tuple[SessionSource, ...] = Field(
        get_args(SessionSource),
        description="How conversations are told apart, in this order, the first that a request has: header"
        " (x-tierline-session), session_id (in metadata), prompt_cache_key, previous_response_id, beginning (the same"
        " system prompt and first message of the same key).",
    )
    margin: float = Field(
        0.05, ge=0, le=1, description="P(success) that a larger tier must gain, beyond the cost of the switch."
    )
    downgrade_after: Annotated[int, Field(ge=1, le=1000)] | Literal["never"] = Field(
        "never",
        description="Turns in a row that must want a smaller tier before the conversation gets it; never: not before"
        " the pin ends.",
    )

    @model_validator(mode="after")
    def _sources(self) -> Self:
        if not self.by:
            raise ValueError("'by' is empty: name a source, or turn sessions off with 'pin: off'")
        if len(set(self.by)) != len(self.by):
            raise ValueError("'by' names a source twice")
        return self
