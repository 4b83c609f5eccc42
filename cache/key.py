"""What must be equal before an answer may be given again: partition, context, exact digest.

    partition  who may share the answer: tenant scope, the client's salt, model group, epoch
    context    everything the model sees or obeys except the words of the last user turn
    exact      partition, context and those words

Only the words of the last user turn may ever be fuzzy, and only inside one partition and one context. A field
that nobody thought of is part of the context by construction: fields are named here only to be left out, or because
two ways of writing them mean the same. Requests that mean the same share answers; requests that may not never do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from cache.words.text import main_script, normal_form, one_spelling

# Changes whenever the same request would get another digest: old entries then simply never match.
VERSION = "tierline-cache-key-4"

# Fields that are in the partition, or that change how an answer travels or is accounted for, never what it says.
_NOT_IN_CONTEXT = frozenset(
    {
        "cache_salt",
        "messages",
        "metadata",
        "model",  # the model that answers is in the partition, whatever name was asked for
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "user",
    }
)
# Values that mean the same as leaving the field out, whichever server answers.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "n": (1,),
    "logprobs": (False,),
    "logit_bias": ({},),
    "stop": ([],),
    "tools": ([],),
    "functions": ([],),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
}
# At temperature 0 the most likely token wins, whatever these say.
_RANDOMNESS_FIELDS = frozenset({"top_p", "top_k", "min_p", "typical_p", "seed"})


class CacheKey(msgspec.Struct, frozen=True):
    """Identity of a request. The digests are hexadecimal SHA-256; `text` is the last user text as given."""

    scope: str
    partition: str
    context: str
    text: str
    exact: str


def build_key(
    payload: dict[str, Any],
    *,
    scope: str,
    model_group: str,
    epoch: int = 0,
    guards: str = "",
    defaults: Mapping[str, object] | None = None,
) -> CacheKey:
    """Derive the key of a chat request.

    Args:
        payload: the decoded JSON body of `POST /v1/chat/completions`.
        scope: the tenant that may share answers, such as `team:UUID`. Never empty.
        model_group: the model, or the group of models whose answers are interchangeable for this request.
        epoch: raising it invalidates every older entry at once.
        guards: what tells the rules by which answers are changed before they are kept from other such rules.
        defaults: what the model that answers takes where a request names no value, as far as that is known: naming
            it and leaving it out are the same request then. The limit of tokens goes by `max_completion_tokens`.

    Raises:
        ValueError: the scope is empty or the payload has no list of messages.
    """
    if not scope:
        raise ValueError("a cache key needs a scope: without one, tenants would share answers")
    messages = payload.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("a cache key needs a request with a non-empty list of messages")
    texts, earlier_and_shape = _split_last_user_text(messages)
    written = _one_writing(texts)
    salt = payload.get("cache_salt")
    parts = [*([] if salt is None else [_canonical(salt)]), *([f"guards {guards}"] if guards else [])]
    partition = _digest("partition", scope, model_group, str(epoch), *parts)
    fields = _canonical_fields(payload, defaults or {})
    context = _digest("context", _canonical(earlier_and_shape), _canonical(fields), main_script("\n".join(written)))
    return CacheKey(
        scope=scope,
        partition=partition,
        context=context,
        text="\n".join(texts),
        exact=_digest("exact", partition, context, *written),
    )


def _canonical_fields(payload: dict[str, Any], defaults: Mapping[str, object]) -> dict[str, object]:
    """Every field that counts, in one form: the value that the model will obey, named or not."""
    given = {
        name: value for name, value in payload.items() if name not in _NOT_IN_CONTEXT and not _is_neutral(name, value)
    }
    limit = given.get("max_tokens")
    if limit is not None and given.setdefault("max_completion_tokens", limit) == limit:
        del given["max_tokens"]  # the older name of the same limit
    if given.get("top_k") == -1:
        given["top_k"] = 0  # both mean: every token
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    fields = {**defaults, **given}
    if fields.get("temperature") == 0:
        fields = {name: value for name, value in fields.items() if name not in _RANDOMNESS_FIELDS}
    return fields


def last_user_text(messages: list[Any]) -> str | None:
    """Text of the last turn when it is the user's, its text parts joined by newlines; None when it is not."""
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or last.get("role") != "user":
        return None
    content = last.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if _is_text_part(part))
    return None


def _split_last_user_text(messages: list[Any]) -> tuple[list[str], list[Any]]:
    """The words of the last user turn, text part by text part, and the hard part: every turn, those words taken out.

    What is left of a text part is marked, so that it is no part that came without words.
    """
    hard = [_plain_message(message) for message in messages]
    if last_user_text(messages) is None:
        return [], hard
    last = dict(messages[-1])
    content = last["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    last["content"] = [
        ["words", {name: value for name, value in part.items() if name != "text"}]
        if _is_text_part(part)
        else ["whole", part]
        for part in parts
    ]
    hard[-1] = _without_nulls(last)
    return [part["text"] for part in parts if _is_text_part(part)], hard


def _one_writing(texts: list[str]) -> list[str]:
    """The texts with one spelling per character and one kind of line end.

    Space around is dropped from a single text only: between parts it may be what keeps two words apart.
    """
    return [normal_form(texts[0])] if len(texts) == 1 else [one_spelling(text) for text in texts]


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _plain_message(message: object) -> object:
    """A message whose content is one bare text part says the same as one whose content is that string."""
    if not isinstance(message, dict):
        return message
    plain = _without_nulls(message)
    content = plain.get("content")
    if isinstance(content, list) and len(content) == 1 and _is_text_part(content[0]) and len(content[0]) == 2:
        plain["content"] = content[0]["text"]
    return plain


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if item is not None}


def _is_neutral(name: str, value: object) -> bool:
    return value is None or any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)  # 0 == False in Python, not in JSON
        for neutral in _NEUTRAL.get(name, ())
    )


def _canonical(value: object) -> str:
    """JSON with sorted keys, and one spelling per number (1.0 is 1)."""
    return json.dumps(_one_number(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _one_number(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_one_number(item) for item in value]
    if isinstance(value, dict):
        return {name: _one_number(item) for name, item in cast(dict[str, object], value).items()}
    return value


def _digest(*parts: str) -> str:
    """SHA-256 over the version and the parts, each preceded by its length so that no two lists run together."""
    digest = hashlib.sha256()
    for part in (VERSION, *parts):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big"))
        digest.update(encoded)
    return digest.hexdigest()
