"""A `tokenizer.json`, as folders of Hugging Face hold it: the library reads it, here is found out what it promises.

Supported are byte-level vocabularies and SentencePiece's (BPE or Unigram); those that cannot say which bytes a token
stands for (WordPiece, say) are refused, because text could not be streamed token by token.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import AddedToken, pre_tokenizers

from engine.loader.info import CONTROL, UNKNOWN, TokenizerData
from engine.pipelines.pipeline import Pipeline, SpacePrefix, twin

_SPACE = "▁"


def build(data: TokenizerData) -> Pipeline:
    """The pipeline that the file defines. Raises ValueError for one that cannot be served."""
    assert data.definition is not None
    file = tokenizers.Tokenizer.from_str(data.definition)
    added = _added(file, data)
    raw, literal = twin(file, added, literal=False), twin(file, added, literal=True)
    for token in added:
        for tokenizer in (raw, literal):
            if tokenizer.token_to_id(token.content) != file.token_to_id(token.content):
                raise ValueError(f"the id of token {token.content!r} leaves a gap behind the vocabulary")
    decoder = _state(file.decoder)
    byte_level = _find(decoder, "ByteLevel") is not None
    if not byte_level and not _reads_spaces(decoder):
        raise ValueError(f"decoder {decoder.get('type')!r} is not supported (supported: ByteLevel, SentencePiece's)")
    prefix = "never" if byte_level else _space_prefix(file)
    inner = literal
    if prefix == "first":
        inner = twin(file, added, literal=True)
        inner.pre_tokenizer = _without_prefix(file.pre_tokenizer)
    return Pipeline(
        raw, literal, inner, byte_level=byte_level, composes=_composes(_state(file.normalizer)), space_prefix=prefix
    )


def _added(file: tokenizers.Tokenizer, data: TokenizerData) -> list[AddedToken]:
    """The file's added tokens within the model's vocabulary, by id, those of type control as special ones."""
    added: list[AddedToken] = []
    for token_id, token in sorted(file.get_added_tokens_decoder().items()):
        if token_id < len(data.tokens):
            token.special = data.types[token_id] in (CONTROL, UNKNOWN)
            added.append(token)
    return added


def _state(part: Any) -> dict[str, Any]:
    """A part of the pipeline as the JSON it is saved as."""
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _find(state: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """The part of type `kind` in `state`, which may be a sequence of parts."""
    if state.get("type") == kind:
        return state
    nested: list[dict[str, Any]] = next(
        (state[name] for name in ("decoders", "normalizers", "pretokenizers") if name in state), []
    )
    return next((found for part in nested if (found := _find(part, kind)) is not None), None)


def _reads_spaces(decoder: dict[str, Any]) -> bool:
    replace = _find(decoder, "Replace") or {}
    metaspace = _find(decoder, "Metaspace") or {}
    return replace.get("pattern") == {"String": _SPACE} or metaspace.get("replacement") == _SPACE


def _composes(normalizer: dict[str, Any]) -> bool:
    nested = normalizer.get("normalizers")
    if nested is not None:
        return any(map(_composes, nested))
    return normalizer.get("type") not in (None, "Replace", "Prepend", "Lowercase")


def _space_prefix(file: tokenizers.Tokenizer) -> SpacePrefix:
    if _find(_state(file.normalizer), "Prepend") is not None:
        return "always"
    scheme = (_find(_state(file.pre_tokenizer), "Metaspace") or {}).get("prepend_scheme", "never")
    return "first" if scheme == "first" else "always" if scheme == "always" else "never"


def _without_prefix(pre_tokenizer: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    state = {"type": "Sequence", "pretokenizers": [_state(pre_tokenizer)]}
    metaspace = _find(state, "Metaspace")
    assert metaspace is not None
    metaspace["prepend_scheme"] = "never"
    changed = pre_tokenizers.Sequence([])
    changed.__setstate__(json.dumps(state).encode())
    return changed
