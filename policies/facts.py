"""What a rule may look at: the variables of `when` expressions, and how they are read from a chat request.

`VARIABLES` is the one list of them: the checker, the evaluator and the reference page all use it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec

from tiers.features import estimate_tokens, estimate_turns, has_images, text_of, wants_json
from tiers.language import LANGUAGES, language_of
from tiers.task import TASKS, TaskProfile

# Bounds of what a rule may have to look at: they bound what a condition can cost (`cost.py`).
LONGEST_TEXT: Final = 65_536  # characters of `user_text` and of `system_text`
MOST_TAGS: Final = 16
LONGEST_TAG: Final = 2 * 64 + 1  # characters: name, `=`, value
_TURNS: Final = 5  # that are asked for their language


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable: its CEL type, what it means, and the values it can have where they are few."""

    type: str
    meaning: str
    values: tuple[str, ...] = ()


VARIABLES: Final[dict[str, Variable]] = {
    "prompt_tokens": Variable("int", "Estimated tokens of all messages and tools."),
    "max_tokens": Variable("int", "Bound of the answer that the client asked for; 0 where it gave none."),
    "messages": Variable("int", "Number of messages."),
    "turns": Variable("int", "Number of user messages."),
    "task": Variable("string", "What the request is about, as the classifier sees it.", TASKS),
    "task_confidence": Variable("double", "How sure the classifier is, 0 to 1."),
    "complexity": Variable("double", "How hard the request looks, 0 to 1: the share of models that would fail."),
    "in_distribution": Variable("bool", "False where the text is unlike anything the classifier knows."),
    "has_tools": Variable("bool", "Whether the request offers tools."),
    "has_images": Variable("bool", "Whether a message holds an image."),
    "wants_json": Variable("bool", "Whether the answer is bound to JSON (response_format)."),
    "stream": Variable("bool", "Whether the client wants a stream."),
    "temperature": Variable("double", "Temperature of the request; 1.0 where it gave none."),
    "language": Variable(
        "string", "Language of the last user message, such as 'en'; '' where it cannot be told.", ("", *LANGUAGES)
    ),
    "system_text": Variable("string", "Text of the system and developer messages; of a long one, start and end."),
    "user_text": Variable("string", "Text of the last user message; of a long one, start and end."),
    "model": Variable("string", "Model that the client asked for; 'auto' where the policy chooses."),
    "organisation": Variable("string", "Organisation of the key."),
    "team": Variable("string", "Team of the key."),
    "project": Variable("string", "Project of the key or of the request."),
    "key": Variable("string", "Id of the key."),
    "tags": Variable("list", "Tags of the request (header x-tierline-tags), each as 'NAME=VALUE'."),
    "hour": Variable("int", "Hour of the day, 0 to 23, local time of the gateway."),
    "weekday": Variable("int", "Day of the week, 1 (Monday) to 7 (Sunday), local time of the gateway."),
    "budget": Variable("map", "budget.used: share of the month's budget that is spent, 0 where there is none."),
}
# Fields of variables of type map, with their types.
MEMBERS: Final[dict[str, dict[str, str]]] = {"budget": {"used": "double"}}
# Variables that need the classifier; a policy that uses none of them (and no `tier: auto`) does not pay for it.
PROFILE_VARIABLES: Final = frozenset({"task", "task_confidence", "complexity", "in_distribution"})
# Variables that are fields of `Facts` by the same name and of the same type.
PLAIN_VARIABLES: Final = VARIABLES.keys() - PROFILE_VARIABLES - {"budget", "tags"}
# Variables that hold what people wrote: for rules only, never for logs or records.
TEXT_VARIABLES: Final = frozenset({"system_text", "user_text"})


class Facts(msgspec.Struct, frozen=True):
    """One request as the rules see it. `pinned_tier` is the tier that the client fixed by header, if it did.

    `profile` is needed where a rule uses the classifier (`Policy.needs_profile`) and may be None elsewhere.
    """

    prompt_tokens: int = 0
    max_tokens: int = 0
    messages: int = 1
    turns: int = 1
    has_tools: bool = False
    has_images: bool = False
    wants_json: bool = False
    stream: bool = False
    temperature: float = 1.0
    language: str = ""
    system_text: str = ""
    user_text: str = ""
    model: str = "auto"
    organisation: str = ""
    team: str = ""
    project: str = ""
    key: str = ""
    tags: tuple[str, ...] = ()
    hour: int = 12
    weekday: int = 1
    budget_used: float = 0.0
    profile: TaskProfile | None = None
    pinned_tier: str | None = None

    def variables(self, names: Iterable[str]) -> dict[str, Any]:
        """The named variables as CEL gets them.

        Raises:
            ValueError: a variable of the classifier is asked for and there is no profile.
        """
        return {name: getattr(self, name) if name in PLAIN_VARIABLES else self._variable(name) for name in names}

    def _variable(self, name: str) -> Any:
        if name in PROFILE_VARIABLES:
            if self.profile is None:
                raise ValueError(f"'{name}' needs the task classifier's profile, and these facts have none")
            return getattr(self.profile, "confidence" if name == "task_confidence" else name)
        if name == "budget":
            return {"used": self.budget_used}
        assert name == "tags"
        return list(self.tags)


class Context(msgspec.Struct, frozen=True):
    """Who asks and when: what a chat request itself does not say."""

    organisation: str = ""
    team: str = ""
    project: str = ""
    key: str = ""
    tags: tuple[str, ...] = ()
    budget_used: float = 0.0
    pinned_tier: str | None = None
    now: datetime = msgspec.field(default_factory=datetime.now)


def from_chat(body: Mapping[str, Any], context: Context, profile: TaskProfile | None = None) -> Facts:
    """Facts of a chat request (`POST /v1/chat/completions`, already checked for types)."""
    messages = body["messages"]
    tools = body.get("tools") or body.get("functions") or []
    temperature = body.get("temperature")
    texts = [text_of(message) for message in messages]
    roles = [message.get("role") for message in messages]
    said = list(zip(roles, texts, strict=True))
    users = [text for role, text in said if role == "user"]
    system = [text for role, text in said if role in ("system", "developer")]
    return Facts(
        prompt_tokens=estimate_turns(texts) + (estimate_tokens(json.dumps(tools)) if tools else 0),
        max_tokens=body.get("max_completion_tokens") or body.get("max_tokens") or 0,
        messages=len(messages),
        turns=len(users),
        has_tools=bool(tools),
        has_images=has_images(messages),
        wants_json=wants_json(body.get("response_format")),
        stream=bool(body.get("stream")),
        temperature=1.0 if temperature is None else float(temperature),
        language=_language(users),
        system_text=shortened(system[0] if len(system) == 1 else "\n".join(system)),
        user_text=shortened(users[-1]) if users else "",
        model=body.get("model", "auto"),
        organisation=context.organisation,
        team=context.team,
        project=context.project,
        key=context.key,
        tags=context.tags,
        hour=context.now.hour,
        weekday=context.now.isoweekday(),
        budget_used=context.budget_used,
        profile=profile,
        pinned_tier=context.pinned_tier,
    )


def _language(users: Sequence[str]) -> str:
    """Of the last turn, or where that is too short to tell, of the latest that does."""
    return next((language for text in reversed(users[-_TURNS:]) if (language := language_of(text))), "")


def shortened(text: str) -> str:
    """The text as rules see it: of one longer than `LONGEST_TEXT` its first and its last half of that. What a prompt
    asks for stands there; between them is what it is asked about."""
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return text[:half] + text[-half:]
