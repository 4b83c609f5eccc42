"""Text to token ids and back, with the tokenizer that a model brings.

Used by the HTTP side and by the engine; imports no torch. Safe to share between threads. How each kind of tokenizer is
built stands in `engine.pipelines`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import tokenizers

from engine.loader.errors import ModelFileError
from engine.loader.info import BYTE, CONTROL, UNKNOWN, ModelInfo, TokenizerData
from engine.pipelines.byte_level import byte_characters
from engine.pipelines.pipeline import build_pipeline

# Names under which families call a token that ends an answer, for files that name no more than one.
_END_TOKENS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>",
    "<|return|>", "<|call|>",
)  # fmt: skip
_BYTES = byte_characters()
_SPACE = "▁"
# White space as the library's added tokens strip it: Unicode's White_Space, which `str.strip` goes beyond.
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


class Tokenizer:
    """Encodes and decodes for one model.

    `bos_id`, `closing_id`: put first and last by `encode(add_special=True)` when the model wants them, else None.
    `end_ids`: the tokens that end an answer. `raw`: the underlying `tokenizers.Tokenizer`, control tokens included.
    `control_names` matches the names of control tokens in a text; None where the model has none. `longest_token`: no
    token stands for more characters of a text than that, white space that a model drops aside.
    """

    def __init__(self, info: ModelInfo) -> None:
        """Raises ModelFileError for a tokenizer that is broken or of a kind that is not supported."""
        data = info.tokenizer
        try:
            self._pipeline = build_pipeline(data)
        except Exception as error:  # the library raises bare Exception for a broken vocabulary
            raise ModelFileError(info.path, f"tokenizer: {error}", "Use a model with a supported tokenizer") from error
        self.raw: tokenizers.Tokenizer = self._pipeline.raw
        self.vocab_size = len(data.tokens)
        self.bos_id = data.bos_id if data.add_bos else None
        self.closing_id = data.eos_id if data.add_eos else None
        self.eos_id = data.eos_id
        self.end_ids = end_ids(data)
        self.special_ids = frozenset(i for i, kind in enumerate(data.types) if kind in (CONTROL, UNKNOWN))
        self._forgeable = frozenset(i for i, kind in enumerate(data.types) if kind == CONTROL)
        self._control_ids = {data.tokens[i]: i for i in sorted(self.special_ids) if data.tokens[i]}
        longest_first = sorted(self._control_ids, key=len, reverse=True)
        self.control_names = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self._tokens = data.tokens
        self._types = data.types
        self._added = self._pipeline.added()
        # A character of a byte-level token is a byte, and a character of the text has one at least. Where the text is
        # composed first (NFC), up to three characters become one, which has two bytes or more.
        composed = 1 if not self._pipeline.composes else 2 if self._pipeline.byte_level else 3
        self.longest_token = composed * max(map(len, data.tokens), default=1)

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        literals: Mapping[str, str] | None = None,
    ) -> list[int]:
        """Token ids of `text`.

        `add_special` puts the model's BOS first, unless the text (a rendered template, say) already begins with it, and
        its EOS last where the model was trained to have it there.
        `parse_special` reads `<|im_end|>` and the like as those tokens; without it they are ordinary text.
        `literals`: characters of `text` that stand for texts, which are read as ordinary text even so.
        """
        ids: list[int]
        if literals and parse_special:
            ids = self._encode_around(text, literals)
        elif parse_special:
            (ids,) = _ids(self.raw, [text])
        else:
            (ids,) = self._literal_ids(self._pipeline.literal, [text])
        if add_special and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        if add_special and self.closing_id is not None and ids[-1:] != [self.closing_id]:
            ids = [*ids, self.closing_id]
        return ids

    def _encode_around(self, text: str, literals: Mapping[str, str]) -> list[int]:
        """Control tokens by name, and what stands between them as the library itself reads it: each stretch alone."""
        pieces = [text] if self.control_names is None else self.control_names.split(text)
        for at in range(1, len(pieces), 2):
            token = self._added[self._control_ids[pieces[at]]]
            if token.rstrip:
                pieces[at + 1] = pieces[at + 1].lstrip(_WHITE_SPACE)
            if token.lstrip:
                pieces[at - 1] = pieces[at - 1].rstrip(_WHITE_SPACE)
        table = str.maketrans(dict(literals))
        stretches = [piece.translate(table) for piece in pieces[::2]]
        ids, *following = [
            *self._literal_ids(self._pipeline.literal, stretches[:1]),
            *self._literal_ids(self._pipeline.inner, stretches[1:]),
        ]
        for name, stretch in zip(pieces[1::2], following, strict=True):
            ids.append(self._control_ids[name])
            ids += stretch
        return ids

    def _literal_ids(self, tokenizer: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
        """Ids of texts without control tokens, even where the vocabulary itself would build one from its letters."""
        return [ids if self._forgeable.isdisjoint(ids) else list(self._spelled(ids)) for ids in _ids(tokenizer, texts)]

    def _spelled(self, ids: list[int]) -> Iterator[int]:
        for token_id in ids:
            if token_id not in self._forgeable:
                yield token_id
                continue
            for character in self._tokens[token_id]:
                spelled = [_SPACE if character == " " else character]
                if self._pipeline.byte_level:
                    spelled = [_CHARACTERS[byte] for byte in character.encode()]
                for token in spelled:
                    yield from (found.id for found in self.raw.model.tokenize(token))

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. Ids outside the vocabulary raise ValueError.

        A space that the model puts before every text is not part of it.
        """
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        hidden = self.special_ids if skip_special else frozenset()
        text = b"".join(self.token_bytes(i) for i in ids if i not in hidden).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._pipeline.space_prefix != "never" else text

    def opens_with_space(self, prompt: Sequence[int]) -> bool:
        """Whether text that begins behind `prompt` has a space in its first token that is no part of the text.

        Some models write every text, or every stretch of it behind a control token, with one before it.
        """
        prefix = self._pipeline.space_prefix
        if prefix == "never":
            return False
        return not prompt or (prefix == "always" and prompt[-1] in self.special_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for (a character may be split between tokens); special ones by name.

        Ids behind the vocabulary, which pad the model's matrices and can be sampled all the same, stand for nothing.
        """
        if token_id >= self.vocab_size:
            return b""
        token = self._tokens[token_id]
        if self._pipeline.byte_level:
            if token_id in self._added:
                return token.encode()
            return b"".join(_BYTES[c] if c in _BYTES else c.encode() for c in token)
        if self._types[token_id] == BYTE:
            return bytes([int(token[1:-1], 16)])
        return token.replace(_SPACE, " ").encode()


def _ids(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    """Token ids of each text. In batches, even of one, the library lets other threads run meanwhile."""
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def end_ids(data: TokenizerData) -> frozenset[int]:
    """The tokens that end an answer: those the model names, and where it names one only, control tokens known to."""
    ends = frozenset(i for i in (data.eos_id, data.eot_id) if i is not None) | data.end_ids
    if data.end_ids:
        return ends
    named = {token for i, token in enumerate(data.tokens) if data.types[i] == CONTROL and token in _END_TOKENS}
    if "<|return|>" in named:  # gpt-oss: this one ends a part of the answer, and another part follows
        named.discard("<|end|>")
    return ends | {i for i, token in enumerate(data.tokens) if data.types[i] == CONTROL and token in named}


_CHARACTERS = {data[0]: character for character, data in _BYTES.items()}
