"""Text to token ids and back, with the tokenizer that a GGUF file carries.

Byte-level BPE (`tokenizer.ggml.model` "gpt2": Llama 3, SmolLM, Qwen, GPT-2 and most others) on the `tokenizers`
library. Used by the HTTP side and by the engine; imports no torch. Safe to share between threads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from engine.loader.errors import ModelFileError
from engine.loader.info import ModelInfo, TokenizerData

_CONTROL, _USER_DEFINED = 3, 4
# Names under which families call a token that ends an answer, besides the one the file names.
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>")

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# `tokenizer.ggml.pre` -> digits at a time in the word pattern above.
_WORD_PATTERNS = {"llama-bpe": r"\p{N}{1,3}", "llama3": r"\p{N}{1,3}", "llama-v3": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")
_GPT2 = ("default", "gpt-2", "gpt2")


class Tokenizer:
    """Encodes and decodes for one model.

    `bos_id`: put first by `encode(add_special=True)` when the model wants it, else None. `end_ids`: the tokens that
    end an answer. `raw`: the underlying `tokenizers.Tokenizer`, special tokens included, for incremental decoding.
    `control_names` matches the names of control tokens in a text; None where the model has none. `longest_token`: no
    token stands for more characters of a text than that.
    """

    def __init__(self, info: ModelInfo) -> None:
        """Raises ModelFileError for a tokenizer model or pre-tokenizer that is not supported."""
        data = info.tokenizer
        try:
            self.raw = _build(data, parse_special=True)
            self._literal = _build(data, parse_special=False)
        except Exception as error:  # the library raises bare Exception for a broken vocabulary
            raise ModelFileError(
                info.path, f"tokenizer: {error}", "Use a file with a byte-level BPE tokenizer"
            ) from error
        self.vocab_size = len(data.tokens)
        self.bos_id = data.bos_id if data.add_bos else None
        self.eos_id = data.eos_id
        self.end_ids = end_ids(data)
        self.special_ids = frozenset(i for i, kind in enumerate(data.types) if kind == _CONTROL)
        self._control_ids = {data.tokens[i]: i for i in sorted(self.special_ids) if data.tokens[i]}
        longest_first = sorted(self._control_ids, key=len, reverse=True)
        self.control_names = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        # A character of a byte-level token is a byte, and a character of the text has one at least. Where the text is
        # composed first (NFC), up to three characters become one of two bytes.
        composed = 2 if self.raw.normalizer is not None else 1
        self.longest_token = composed * max(map(len, data.tokens), default=1)
        self._tokens = data.tokens
        self._added = self.special_ids | {i for i, kind in enumerate(data.types) if kind == _USER_DEFINED}

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        literals: Mapping[str, str] | None = None,
    ) -> list[int]:
        """Token ids of `text`.

        `add_special` puts the model's BOS first, unless the text (a rendered template, say) already begins with it.
        `parse_special` reads `<|im_end|>` and the like as those tokens; without it they are ordinary text.
        `literals`: characters of `text` that stand for texts, which are read as ordinary text even so.
        """
        ids: list[int]
        if literals and parse_special:
            ids = self._encode_around(text, literals)
        else:
            (ids,) = _ids(self.raw if parse_special else self._literal, [text])
        if add_special and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def _encode_around(self, text: str, literals: Mapping[str, str]) -> list[int]:
        """Control tokens by name, and what stands between them as the library itself reads it: each stretch alone."""
        pieces = [text] if self.control_names is None else self.control_names.split(text)
        table = str.maketrans(dict(literals))
        between = _ids(self._literal, [piece.translate(table) for piece in pieces[::2]])
        ids = between[0]
        for name, following in zip(pieces[1::2], between[1:], strict=True):
            ids.append(self._control_ids[name])
            ids += following
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. Ids outside the vocabulary raise ValueError."""
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        text: str = self.raw.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for (a character may be split between tokens); special ones by name."""
        token = self._tokens[token_id]
        if token_id in self._added:
            return token.encode()
        return b"".join(_BYTES[c] if c in _BYTES else c.encode() for c in token)


def _ids(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    """Token ids of each text. In batches, even of one, the library lets other threads run meanwhile."""
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def end_ids(data: TokenizerData) -> frozenset[int]:
    """The tokens that end an answer: those the file names, and control tokens known to do so."""
    named = {i for i, token in enumerate(data.tokens) if data.types[i] == _CONTROL and token in _END_TOKENS}
    return frozenset(named | {i for i in (data.eos_id, data.eot_id) if i is not None})


def _build(data: TokenizerData, *, parse_special: bool) -> tokenizers.Tokenizer:
    if data.model != "gpt2":
        raise ValueError(f"model {data.model!r} is not supported, only 'gpt2' (byte-level BPE) is")
    vocab = {token: i for i, token in enumerate(data.tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in data.merges)]
    # Llama 3's vocabulary holds whole words that its merges do not build.
    whole_words = data.pre in ("llama-bpe", "llama3", "llama-v3")
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=whole_words))
    tokenizer.pre_tokenizer = _pre_tokenizer(data.pre)
    tokenizer.decoder = decoders.ByteLevel()
    if data.pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    for kind, special in ((_USER_DEFINED, False), (_CONTROL, True)):
        if special and not parse_special:
            continue
        added = [
            AddedToken(t, special=special, normalized=False)
            for t, k in zip(data.tokens, data.types, strict=True)
            if k == kind
        ]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    return tokenizer


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    if pre in _WORD_PATTERNS:
        words = pre_tokenizers.Split(Regex(_WORDS % _WORD_PATTERNS[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join(sorted([*_GPT2, *_SINGLE_DIGITS, *_WORD_PATTERNS]))
    raise ValueError(f"pre-tokenizer {pre!r} is not supported (supported: {known})")


def _byte_characters() -> dict[str, bytes]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the others for code points from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}


_BYTES = _byte_characters()
