"""SentencePiece's BPE from a GGUF file (`tokenizer.ggml.model` "llama"): Gemma, Mistral, Phi-3, Llama 2.

Such a file has a score for each token and no merges. SentencePiece joins, again and again, the two neighbours that make
the token with the highest score. That is BPE whose merges are all ways of cutting a token into two, by score.
"""

from __future__ import annotations

from dataclasses import replace

import tokenizers
from tokenizers import decoders, models, normalizers

from engine.loader.info import BYTE, NORMAL, UNKNOWN, USER_DEFINED, TokenizerData
from engine.pipelines.byte_level import added_tokens
from engine.pipelines.pipeline import Pipeline, twin

SPACE = "▁"


def build(data: TokenizerData) -> Pipeline:
    """The pipeline of a vocabulary with scores. Raises ValueError where only some bytes have a token."""
    data = replace(data, tokens=[_spelled(token) for token in data.tokens])
    vocab = {token: i for i, token in enumerate(data.tokens)}
    missing = next((name for byte in range(256) if (name := f"<0x{byte:02X}>") not in vocab), None)
    if missing and BYTE in data.types:
        raise ValueError(f"the vocabulary has tokens for bytes, but none is {missing}")
    unknown = next((token for token, kind in zip(data.tokens, data.types, strict=True) if kind == UNKNOWN), None)
    raw = tokenizers.Tokenizer(
        models.BPE(vocab, _merges(data), unk_token=unknown, fuse_unk=True, byte_fallback=missing is None)
    )
    spaces = normalizers.Replace(" ", SPACE)
    raw.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if data.space_prefix else spaces
    raw.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    added = added_tokens(data)
    raw.add_tokens(added)
    literal = twin(raw, added, literal=True)
    return Pipeline(raw, literal, literal, byte_level=False, space_prefix="always" if data.space_prefix else "never")


def _spelled(token: str) -> str:
    """Runs of spaces, which files spell as such where they are user-defined, as the model itself spells them."""
    return SPACE * len(token) if token.strip(" ") == "" else token


def _merges(data: TokenizerData) -> list[tuple[str, str]]:
    """Best score first; of equal ones the longer part first, as in the conversions of the library's authors."""
    scores = {
        token: 0.0 if kind == USER_DEFINED else score  # runs of spaces are joined before anything else is
        for token, kind, score in zip(data.tokens, data.types, data.scores, strict=True)
        if kind == NORMAL or (kind == USER_DEFINED and token.strip(SPACE) == "")
    }
    found = [
        (-score, -cut, cut - len(token), token[:cut], token[cut:])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    found.sort()
    return [(left, right) for *_, left, right in found]
