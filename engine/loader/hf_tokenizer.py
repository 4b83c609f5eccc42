"""The tokenizer and chat templates of a Hugging Face folder.

`tokenizer.json` says how texts become tokens, `tokenizer_config.json` which tokens begin and end a text, and
`generation_config.json` or `config.json` which ones end an answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.loader.errors import ModelFileError
from engine.loader.folder import Folder
from engine.loader.info import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    GenerationDefaults,
    TokenizerData,
)

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_GENERATION_CONFIG = "generation_config.json"
_BYTE_NAME = re.compile(r"<0x[0-9A-F]{2}>")
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_tokenizer(folder: Folder, config: Mapping[str, Any], vocab_size: int) -> TokenizerData:
    """The folder's tokenizer; tokens that the model of `vocab_size` has no place for are left out.

    Raises ModelFileError for a file that is missing or damaged.
    """
    definition = folder.need(TOKENIZER, "the tokenizer")
    content = folder.parse(TOKENIZER, definition)
    settings = folder.json(TOKENIZER_CONFIG)
    try:
        model, added = content["model"], content.get("added_tokens") or []
        vocabulary = model["vocab"]
        ids = {name: i for i, (name, _) in enumerate(vocabulary)} if isinstance(vocabulary, list) else dict(vocabulary)
        ids |= {token["content"]: token["id"] for token in added}
        tokens, types = _tables(ids, vocab_size)
        fallback = bool(model.get("byte_fallback"))
        unknown = _unknown(model)
        special = {token["content"] for token in added if token.get("special")}
        for name, i in ids.items():
            if fallback and i < len(tokens) and _BYTE_NAME.fullmatch(name):
                types[i] = BYTE
        special |= {name for key in _NAMED if (name := _name(settings.get(key))) in {t["content"] for t in added}}
        for token in added:
            if token["id"] < len(tokens):
                types[token["id"]] = CONTROL if token["content"] in special else USER_DEFINED
        if unknown is not None and ids[unknown] < len(tokens):
            types[ids[unknown]] = UNKNOWN
        opens, closes = _around(content.get("post_processor"))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, StopIteration) as error:
        raise ModelFileError(
            folder.path / TOKENIZER, f"damaged: {type(error).__name__}: {error}", "Copy it anew"
        ) from error

    def token_id(key: str) -> int | None:
        found = ids.get(_name(settings.get(key)) or "")
        return found if found is not None and found < len(tokens) else None

    bos, eos = token_id("bos_token"), token_id("eos_token")
    bos = opens if bos is None else bos
    eos = closes if eos is None else eos
    return TokenizerData(
        model="tokenizer.json",
        pre="",
        tokens=tokens,
        types=types,
        merges=[],
        bos_id=bos,
        eos_id=eos,
        eot_id=None,
        # What tokenizer_config.json says counts, as in transformers; where it says nothing, what the pipeline does.
        add_bos=bool(settings.get("add_bos_token", opens is not None)) and bos is not None,
        add_eos=bool(settings.get("add_eos_token", closes is not None)) and eos is not None,
        end_ids=_end_ids(folder, config, len(tokens)),
        definition=definition,
    )


def _tables(ids: Mapping[str, int], vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and types by id; ids that no token has are of type unused, with a text that none can have."""
    size = min(vocab_size, max(ids.values(), default=-1) + 1)
    tokens, types = [""] * size, [UNUSED] * size
    for name, i in ids.items():
        if i < 0:
            raise ValueError(f"token {name!r} has the id {i}")
        if i < size:
            tokens[i], types[i] = name, NORMAL
    return tokens, types


def _unknown(model: Mapping[str, Any]) -> str | None:
    if "unk_id" in model:  # Unigram's vocabulary is a list
        return None if model["unk_id"] is None else str(model["vocab"][model["unk_id"]][0])
    unknown = model.get("unk_token")
    return str(unknown) if unknown is not None and unknown in model["vocab"] else None


def _name(token: Any) -> str | None:
    """Special tokens are written as texts, or as objects with their properties."""
    return token.get("content") if isinstance(token, dict) else token


def _around(processor: Any) -> tuple[int | None, int | None]:
    """The tokens that the post-processor puts before and behind every text."""
    if processor is None or processor["type"] == "ByteLevel":
        return None, None
    if processor["type"] == "Sequence":
        around = [_around(part) for part in processor["processors"]]
        return next((pair for pair in around if pair != (None, None)), (None, None))
    if processor["type"] != "TemplateProcessing":
        raise ValueError(f"post-processor {processor['type']!r} is not supported")
    parts = [next(iter(part.items())) for part in processor["single"]]
    text = next(i for i, (kind, _) in enumerate(parts) if kind == "Sequence")
    names = [value["id"] for _, value in parts]
    before, behind = [
        [i for name in group for i in processor["special_tokens"][name]["ids"]]
        for group in (names[:text], names[text + 1 :])
    ]
    if len(before) > 1 or len(behind) > 1:
        raise ValueError("several tokens are put around every text, which no supported model does")
    return next(iter(before), None), next(iter(behind), None)


def _end_ids(folder: Folder, config: Mapping[str, Any], size: int) -> frozenset[int]:
    found = folder.json(_GENERATION_CONFIG).get("eos_token_id")
    if found is None:
        found = config.get("eos_token_id")
    listed = found if isinstance(found, list) else [found]
    return frozenset(i for i in listed if type(i) is int and 0 <= i < size)


def read_generation(folder: Folder) -> GenerationDefaults:
    """The sampling that `generation_config.json` recommends. Raises ModelFileError for values that make no sense."""
    content = folder.json(_GENERATION_CONFIG)

    def number(key: str, low: float, high: float) -> float | None:
        value = content.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ModelFileError(
                folder.path / _GENERATION_CONFIG, f"{key} is {value!r}, not {low:g} to {high:g}", "Correct it"
            )
        return float(value)

    top_k = number("top_k", 0, 2**31 - 1)
    return GenerationDefaults(
        temperature=number("temperature", 0, 100),
        top_p=number("top_p", 0, 1),
        top_k=None if top_k is None else int(top_k),
        min_p=number("min_p", 0, 1),
        repetition_penalty=number("repetition_penalty", 1e-6, 100),
    )


def read_templates(folder: Folder) -> tuple[str | None, str | None]:
    """The chat template, and the one for conversations with tools where that is another.

    From `chat_template.jinja` and `additional_chat_templates/`, else from `tokenizer_config.json` (one template, or a
    list of named ones), else from `chat_template.json`.
    """
    tools = folder.text("additional_chat_templates/tool_use.jinja")
    if (text := folder.text("chat_template.jinja")) is not None:
        return text, tools
    for name in (TOKENIZER_CONFIG, "chat_template.json"):
        found = folder.json(name).get("chat_template")
        if isinstance(found, str):
            return found, tools
        if isinstance(found, list):
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            default = named.get("default")
            if not isinstance(default, str):
                raise ModelFileError(
                    folder.path / name, "chat_template is a list without one called 'default'", "Give one that name"
                )
            return default, named.get("tool_use", tools)
    return None, tools
