"""Requests that a policy's author has thought of, and what should become of them: `tierline policy test` runs them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from policies.schema.base import ONE_LINE, RouteName, Strict, TierName

MOST_EXAMPLES: Final = 500
_TAG: Final = r"^[^=,]{1,64}=[^,]{0,64}$"


class Expect(Strict):
    """What should be decided; of several, all must be so."""

    tier: TierName | None = Field(None, description="The tier that is decided on, whether or not it has a model here.")
    model: str | None = Field(None, min_length=1, description="The model that a rule names.")
    rule: RouteName | None = Field(None, description="Name of the rule that decides; 'default' where none does.")
    cache: Literal["off", "exact", "semantic"] | None = Field(None, description="The mode of the cache.")

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("an example expects something: one of 'tier', 'model', 'rule' and 'cache'")
        return self


class Example(Strict):
    """A request and what should become of it. Without `team` and the like, it comes from the first of `applies_to`."""

    name: RouteName = Field(description="Shown where it fails.")
    text: str | None = Field(None, min_length=1, description="The question, as the only message.")
    messages: tuple[dict[str, Any], ...] | None = Field(None, min_length=1, description="A conversation, with roles.")
    request: dict[str, Any] | None = Field(None, description="A whole chat request, with tools, stream and so on.")
    organisation: Annotated[str, Field(min_length=1), ONE_LINE] | None = None
    team: Annotated[str, Field(min_length=1), ONE_LINE] | None = None
    project: Annotated[str, Field(min_length=1), ONE_LINE] | None = None
    key: Annotated[str, Field(min_length=1), ONE_LINE] | None = Field(None, description="Id of a key.")
    tags: tuple[Annotated[str, Field(pattern=_TAG)], ...] = Field((), max_length=16, description="Each NAME=VALUE.")
    pin: TierName | None = Field(None, description="As if the client pinned this tier.")
    budget_used: float = Field(0.0, ge=0, description="Share of the month's budget that is spent.")
    hour: int = Field(12, ge=0, le=23, description="Hour of the day.")
    weekday: int = Field(1, ge=1, le=7, description="1 is Monday.")
    prompt_tokens: int | None = Field(None, ge=0, description="As if the prompt were this long; default: as it is.")
    expect: Expect

    @model_validator(mode="after")
    def _one_request(self) -> Self:
        if sum(given is not None for given in (self.text, self.messages, self.request)) != 1:
            raise ValueError("an example has one of 'text', 'messages' and 'request'")
        messages = self.body().get("messages")
        if not isinstance(messages, list) or not messages:
            raise ValueError("'request' needs 'messages', a list of messages")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ValueError("every message is a mapping with a 'role' and a 'content'")
            if not isinstance(message.get("content"), str | list | None):
                raise ValueError("the 'content' of a message is text, or a list of parts")
        return self

    def body(self) -> dict[str, Any]:
        """The chat request."""
        if self.request is not None:
            return self.request
        if self.messages is not None:
            return {"messages": list(self.messages)}
        return {"messages": [{"role": "user", "content": self.text}]}
