"""What is looked for in requests and answers, and what is done where it is found."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from policies.schema.base import ONE_LINE, RouteName, Strict

PersonalData = Literal["email", "phone", "card_number", "iban", "ip_address", "us_ssn", "cn_id_card", "secret"]
Phrase = Annotated[str, Field(min_length=1, max_length=200), ONE_LINE]
Pattern = Annotated[str, Field(min_length=1, max_length=1000)]
Message = Annotated[str, Field(min_length=1, max_length=300), ONE_LINE]
# What stands in place of a finding also stands inside JSON texts, such as the arguments of a tool call.
Replacement = Annotated[str, Field(max_length=64, pattern=r'^[^"\\\x00-\x1f]*$')]
_FINDERS: Final = ("personal_data", "phrases", "patterns", "max_tokens", "check")


class HttpCheck(Strict):
    """A service that is asked whether texts may pass. `gateway/guarding/checking.py` says what it gets and answers."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$", max_length=2000)] = Field(
        description="Where the texts are posted, as JSON."
    )
    timeout_ms: int = Field(500, ge=10, le=10_000, description="How long it may take.")
    on_error: Literal["allow", "deny"] = Field(
        "deny", description="What counts where it does not answer in time, or not as it should."
    )
    token_env: Annotated[str, Field(pattern=r"^TIERLINE_GUARD_[A-Z0-9_]+$")] | None = Field(
        None, description="Environment variable of the gateway with the bearer token for it: TIERLINE_GUARD_…"
    )


class Guardrail(Strict):
    """One rule. What any of its lists finds is found."""

    name: RouteName = Field(description="Shown to who is refused, in the log and in explanations.")
    action: Literal["deny", "redact", "flag"] = Field(
        "deny", description="deny: do not let it pass; redact: replace what was found; flag: only put it on record."
    )
    personal_data: tuple[PersonalData, ...] = Field((), description="Kinds of personal data and secrets to look for.")
    phrases: tuple[Phrase, ...] = Field(
        (), max_length=1000, description="Words and phrases, in any case, with any blanks between words."
    )
    patterns: tuple[Pattern, ...] = Field(
        (), max_length=100, description="Regular expressions (RE2): no backtracking, so none can hold up the gateway."
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Before the model only: the most tokens that a request may have, as estimated."
    )
    check: HttpCheck | None = Field(None, description="A service that decides.")
    message: Message | None = Field(None, description="With deny: what the client is told.")
    replacement: Replacement = Field("[{kind}]", description="With redact: {kind} is what was found.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not any(getattr(self, name) for name in _FINDERS):
            raise ValueError(f"it looks for nothing: give one of {', '.join(_FINDERS)}")
        if self.action == "redact" and (self.max_tokens or self.check):
            raise ValueError("'max_tokens' and 'check' find no place that could be replaced: deny or flag")
        for name, action in (("message", "deny"), ("replacement", "redact")):
            if name in self.model_fields_set and self.action != action:
                raise ValueError(f"'{name}' has a meaning only with 'action: {action}'")
        return self


class Guardrails(Strict):
    """Rules for what goes to models (`before`) and for what comes back (`after`), each from top to bottom."""

    before: tuple[Guardrail, ...] = Field((), max_length=50)
    after: tuple[Guardrail, ...] = Field((), max_length=50)
    streams: Literal["window", "hold"] = Field(
        "window",
        description="window: the end of a stream's text is held back until it is known to be no part of a finding;"
        " hold: a stream is held back until it is whole.",
    )
    window: int = Field(200, ge=20, le=10_000, description="With window: how many characters are held back.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [rule.name for rule in (*self.before, *self.after)]
        if len(set(names)) != len(names):
            raise ValueError("two rules have the same name")
        for rule in self.after:
            if rule.max_tokens:
                raise ValueError(f"'{rule.name}': 'max_tokens' is for 'before'; answers are bounded by the request")
            if rule.check and self.streams == "window":
                raise ValueError(f"'{rule.name}': a service judges whole answers only: give 'streams: hold'")
        return self
