"""A chat request as Anthropic's Messages API takes it. How each parameter is translated: `docs/reference/anthropic.md`.

It promises that a parameter which that API has no word for, and which would change the answer, raises CannotTranslate
instead of being dropped; what only concerns how the other kind of server stores or caches is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from backends.anthropic_turns import conversation, only
from backends.dialect import CannotTranslate
from backends.protocol import Json

MIN_THINKING_TOKENS = 1024

# Words that both APIs share; `thinking`, `top_k` and `cache_control` are Anthropic's own, from clients that know it.
_SAME = ("temperature", "top_p", "top_k", "thinking", "cache_control")
_READ = {
    "model",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "reasoning_effort",
    "user",
    "safety_identifier",
    "service_tier",
    "continue_final_message",
    "add_generation_prompt",
}
# Of no concern to the answer: how a stream is framed, what is stored with it, what is cached where.
_UNSAID = {"stream", "stream_options", "metadata", "prompt_cache_key", "prompt_cache_retention", "cache_salt"}
_KNOWN = _READ.union(_SAME, _UNSAID)
# Values that say what holds anyway.
_NEUTRAL: Mapping[str, object] = {
    "n": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_logprobs": 0,
    "verbosity": "medium",
    "modalities": ["text"],
}

_SERVICE_TIERS = {"auto": "auto", "default": "standard_only", "standard_only": "standard_only"}
_TOOL_CHOICES = {"auto": "auto", "none": "none", "required": "any"}
_EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "max"}
# The share of max_tokens that a model which wants a budget may think.
_BUDGET_SHARES = {"minimal": 0.25, "low": 0.25, "medium": 0.5, "high": 0.75, "xhigh": 0.875, "max": 0.875}
_CLAUDE = re.compile(r"claude-(?:[a-z]+-)?(\d{1,2})(?:[-.](\d{1,2})(?!\d))?(?!\d)")
_FIRST_WITHOUT_BUDGET = (4, 6)


def messages_request(payload: Json, model: str, stream: bool) -> dict[str, Any]:
    """Translate a chat request for `model`, the server's own name.

    Raises:
        CannotTranslate: names the parameter that an Anthropic server has no word for.
    """
    only({name: value for name, value in payload.items() if value != _NEUTRAL.get(name)}, _KNOWN, "")
    system, turns = conversation(payload.get("messages") or [])
    body: dict[str, Any] = {"model": model, "max_tokens": _max_tokens(payload), "messages": turns}
    if system:
        body["system"] = system
    if stream:
        body["stream"] = True
    body |= {name: payload[name] for name in _SAME if payload.get(name) is not None}
    if body.get("temperature", 0) > 1:
        raise CannotTranslate("Anthropic servers take a 'temperature' from 0 to 1.", param="temperature")
    if stop := payload.get("stop"):
        body["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    if user := payload.get("safety_identifier") or payload.get("user"):
        body["metadata"] = {"user_id": user}
    if (tier := payload.get("service_tier")) and tier != "flex":  # which says how long the client would wait
        body["service_tier"] = _one_of(_SERVICE_TIERS, tier, "service_tier")
    if tools := payload.get("tools"):
        body["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
        if choice := _tool_choice(payload):
            body["tool_choice"] = choice
    _add_format(body, payload)
    _add_thinking(body, payload)
    _check_prefill(payload, turns)
    return body


def _max_tokens(payload: Json) -> int:
    most = payload.get("max_completion_tokens") or payload.get("max_tokens")
    if not isinstance(most, int):
        text = "Anthropic servers need 'max_tokens': send it, or set max_output_tokens for the model in tierline.yaml."
        raise CannotTranslate(text, param="max_tokens")
    return most


def _one_of(words: Mapping[str, str], word: object, param: str) -> str:
    if not isinstance(word, str) or word not in words:
        known = ", ".join(words)
        raise CannotTranslate(f"Anthropic servers have no word for '{param}': {word!r}; use {known}.", param=param)
    return words[word]


def _tool(tool: Json, where: str) -> Json:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise CannotTranslate(f"Of tools, Anthropic servers are given functions only, unlike '{where}'.", param=where)
    only(tool, ("type", "function", "cache_control"), where)
    only(function, ("name", "description", "parameters", "strict"), f"{where}.function")
    made = {"name": function.get("name"), "input_schema": {"type": "object", **(function.get("parameters") or {})}}
    made |= {name: function[name] for name in ("description", "strict") if function.get(name)}
    if tool.get("cache_control"):
        made["cache_control"] = tool["cache_control"]
    return made


def _tool_choice(payload: Json) -> Json | None:
    """The choice, which there also says whether several tools may be called at once; None for the default."""
    choice = payload.get("tool_choice")
    one = payload.get("parallel_tool_calls") is False
    if isinstance(choice, dict):
        function = choice.get("function")
        if choice.get("type") != "function" or not isinstance(function, dict):
            text = "Anthropic servers can be told one function, any or none: not this 'tool_choice'."
            raise CannotTranslate(text, param="tool_choice")
        made: Json = {"type": "tool", "name": function.get("name")}
    elif choice is None and not one:
        return None
    else:
        made = {"type": _one_of(_TOOL_CHOICES, choice or "auto", "tool_choice")}
    if one and made["type"] != "none":
        made["disable_parallel_tool_use"] = True
    return made


def _add_format(body: dict[str, Any], payload: Json) -> None:
    """A JSON schema goes to `output_config.format`. There it is always strict."""
    given = payload.get("response_format") or {"type": "text"}
    if given.get("type") == "text":
        return
    described = given.get("json_schema")
    if given.get("type") != "json_schema" or not isinstance(described, dict) or not described.get("schema"):
        text = "Anthropic servers answer in JSON to a schema only: send 'response_format' with a json_schema."
        raise CannotTranslate(text, param="response_format")
    only(described, ("name", "schema", "strict", "description"), "response_format.json_schema")
    schema = dict(described["schema"])
    if described.get("description"):
        schema.setdefault("description", described["description"])
    body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}


def _add_thinking(body: dict[str, Any], payload: Json) -> None:
    """`reasoning_effort` in the words that the model knows: an effort, or for Claude before 4.6 a budget of tokens."""
    effort = payload.get("reasoning_effort")
    if effort is None:
        return
    if "thinking" in body:
        raise CannotTranslate("Send either 'thinking' or 'reasoning_effort'.", param="reasoning_effort")
    if effort == "none":
        body["thinking"] = {"type": "disabled"}
        return
    word = _one_of(_EFFORTS, effort, "reasoning_effort")
    if not _wants_budget(body["model"]):
        body["thinking"] = {"type": "adaptive"}
        body["output_config"] = {**body.get("output_config", {}), "effort": word}
        return
    budget = max(MIN_THINKING_TOKENS, int(body["max_tokens"] * _BUDGET_SHARES[effort]))
    if budget >= body["max_tokens"]:
        text = f"To think, this model needs 'max_tokens' above {MIN_THINKING_TOKENS}."
        raise CannotTranslate(text, param="reasoning_effort")
    if any(block["type"] == "tool_result" for block in body["messages"][-1]["content"]):
        # It would want its own signed thoughts from before the call, which a chat client does not have.
        text = "This model cannot think on from tool results in a chat: leave out 'reasoning_effort' there."
        raise CannotTranslate(text, param="reasoning_effort")
    body["thinking"] = {"type": "enabled", "budget_tokens": budget}


def _wants_budget(model: str) -> bool:
    """Whether it is a Claude before 4.6; later ones refuse budgets and decide by effort."""
    found = _CLAUDE.search(model)
    return found is not None and (int(found[1]), int(found[2] or 0)) < _FIRST_WITHOUT_BUDGET


def _check_prefill(payload: Json, turns: list[Json]) -> None:
    """A last turn of the assistant is always continued there; the words of other servers for it must say the same."""
    continued = turns[-1]["role"] == "assistant"
    for name, wanted in (("continue_final_message", continued), ("add_generation_prompt", not continued)):
        if payload.get(name) not in (None, wanted):
            text = f"Anthropic servers go on from a last message of the assistant, and only from it: drop '{name}'."
            raise CannotTranslate(text, param=name)
