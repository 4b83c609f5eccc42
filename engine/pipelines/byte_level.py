"""Byte-level BPE from a GGUF file: Llama 3, SmolLM, Qwen, gpt-oss, Phi-4, Mistral Nemo and most others.

Such files name the rule by which a text is cut into words (`tokenizer.ggml.pre`) and leave it to the reader to know it.
"""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from engine.loader.info import CONTROL, UNKNOWN, USER_DEFINED, TokenizerData
from engine.pipelines.pipeline import Pipeline, twin

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
)  # words of letters, whatever their case
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
    r"%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)  # a new word begins where small letters are followed by a capital


@dataclass(frozen=True, slots=True)
class _Words:
    """`pattern`: of one word; None: GPT-2's. `whole_words`: the vocabulary holds words that its merges do not build."""

    pattern: str | None = None
    whole_words: bool = False
    single_digits: bool = False
    composed: bool = False  # the text is brought to Unicode's composed form (NFC) first


_GPT2 = _Words()
_DIGITS = _Words(single_digits=True)
_LLAMA3 = _Words(_LETTERS % r"\p{N}{1,3}", whole_words=True)
_QWEN2 = _Words(_LETTERS % r"\p{N}", composed=True)
_GPT4O = _Words(_CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?", r"\p{N}{1,3}"), whole_words=True)
_TEKKEN = _Words(_CASED % ("", "", r"\p{N}"), whole_words=True)
_GPT4 = _Words(_LETTERS % r"\p{N}{1,3}")

# By `tokenizer.ggml.pre`.
_WORDS = {
    "default": _GPT2, "gpt-2": _GPT2, "gpt2": _GPT2,
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "command-r": _DIGITS,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "smaug-bpe": _LLAMA3,
    "dbrx": _GPT4,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": _GPT4O, "llama4": _GPT4O,
    "tekken": _TEKKEN,
}  # fmt: skip


def build(data: TokenizerData) -> Pipeline:
    """The pipeline of a vocabulary with merges. Raises ValueError for a pre-tokenizer that is not supported."""
    words = _WORDS.get(data.pre)
    if words is None:
        raise ValueError(f"pre-tokenizer {data.pre!r} is not supported (supported: {', '.join(sorted(_WORDS))})")
    vocab = {token: i for i, token in enumerate(data.tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in data.merges)]
    raw = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=words.whole_words))
    raw.pre_tokenizer = _pre_tokenizer(words)
    raw.decoder = decoders.ByteLevel()
    if words.composed:
        raw.normalizer = normalizers.NFC()
    added = added_tokens(data)
    raw.add_tokens(added)
    literal = twin(raw, added, literal=True)
    return Pipeline(raw, literal, literal, byte_level=True, composes=words.composed)


def added_tokens(data: TokenizerData) -> list[AddedToken]:
    """The tokens that are read by name: control tokens, the one for what is unknown, and user-defined ones."""
    return [
        AddedToken(
            token, special=kind != USER_DEFINED, normalized=False, rstrip=kind == CONTROL and data.strip_after_control
        )
        for token, kind in zip(data.tokens, data.types, strict=True)
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]


def _pre_tokenizer(words: _Words) -> pre_tokenizers.PreTokenizer:
    if words.pattern is not None:
        split = pre_tokenizers.Split(Regex(words.pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if words.single_digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return gpt2


def byte_characters() -> dict[str, bytes]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the others for code points from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}
