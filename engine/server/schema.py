"""What a client may send: the structs beside `backends.protocol.ChatRequest`, and the refusal of everything else.

A field that stands in no struct is refused by name, so a typing error never passes as a default.
"""

from __future__ import annotations

import difflib
from collections.abc import Set
from typing import Any

import msgspec

from backends.bounds import check_bounds, check_elements
from backends.json_errors import reason
from backends.protocol import ChatRequest, CompletionRequest, Json, Message, StreamOptions, convert
from engine.server.errors import ApiError, unsupported

_LONGEST_NAME = 64
# What SDKs send back of earlier answers is taken, whether or not the model's template reads it.
_MESSAGE_FIELDS = {*Message.__struct_fields__, "annotations", "audio", "reasoning", "reasoning_content"}
_PART_FIELDS = {"type", "text", "cache_control"}  # the last says what to cache, and here all of it is


class Extras(msgspec.Struct):
    """vLLM's fields beyond the OpenAI dialect, for chat and text completions alike."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    tenant: str | None = None
    deadline_ms: int | None = None
    structured_outputs: Json | None = None
    typical_p: float | None = None
    bad_words: list[str | list[int]] | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    guided_json: str | Json | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatExtras(Extras):
    """Those that make sense for a conversation only."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Json | None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /tokenize`: a text or a conversation, with what decides which text the template makes of it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Json] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Json | None = None
    tools: list[Json] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


def decode_object(raw: bytes, *, tokens: str | None = None) -> dict[str, Any]:
    """The JSON object of a request body. `tokens` names the field that may hold many token ids, if there is one.

    Raises:
        ApiError: 400 if the body is not a JSON object.
        InvalidRequest: it is nested too deeply or holds too many elements.
    """
    check_elements(raw)
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, reason(raw, error), code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    check_bounds(body, tokens=tokens)
    return body


def parse_chat(body: dict[str, Any]) -> tuple[ChatRequest, ChatExtras]:
    """Both halves of a chat request.

    Raises:
        ApiError: an unknown field.
        msgspec.ValidationError: a field of the wrong type.
    """
    refuse_unknown(body, ChatRequest, ChatExtras)
    return convert(body, ChatRequest), convert(body, ChatExtras)


def parse_completion(body: dict[str, Any]) -> tuple[CompletionRequest, Extras]:
    """Both halves of a text completion request; raises like `parse_chat`."""
    refuse_unknown(body, CompletionRequest, Extras)
    return convert(body, CompletionRequest), convert(body, Extras)


def check_messages(messages: list[Json], read_by_template: frozenset[str]) -> None:
    """Refuse what nobody would read.

    Raises:
        ApiError: a field of a message, or of a part of one, that neither the engine knows nor the template reads.
    """
    known = _MESSAGE_FIELDS | read_by_template
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        refuse_fields(message, known, f"{where}.")
        if message.get("audio") is not None:
            raise unsupported(f"{where}.audio", "Only text is read.")
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict):
                refuse_fields(part, _PART_FIELDS, f"{where}.content[{j}].")


def refuse_unknown(body: dict[str, Any], *structs: type[msgspec.Struct]) -> None:
    """Raises ApiError for a field that stands in none of the structs."""
    known = {name for struct in structs for name in struct.__struct_fields__}
    refuse_fields(body, known, "")
    options = body.get("stream_options")
    if isinstance(options, dict):
        refuse_fields(options, set(StreamOptions.__struct_fields__), "stream_options.")


def refuse_fields(body: dict[str, Any], known: Set[str], prefix: str) -> None:
    """Raises ApiError for a field of an object that is not known. `prefix`: where the object is, with a dot."""
    for name in body:
        if name not in known:
            name = name[:_LONGEST_NAME]  # of the client's: to compare or to repeat a long one would take long
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean '{prefix}{close[0]}'?" if close else ""
            raise ApiError(
                400, f"Unknown parameter '{prefix}{name}'.{hint}", code="unknown_parameter", param=prefix + name
            )
