"""What the tokenizer is made of: the library's pipeline in the three forms that are needed, and how tokens are spelled.

    raw      reads the names of control tokens in a text as those tokens
    literal  reads them as the characters they are
    inner    as literal, for a stretch of text behind others

All three share one vocabulary, so a quarter of a million tokens lie in memory once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import tokenizers
from tokenizers import AddedToken

from engine.loader.info import TokenizerData

# Where a space is put before a text: nowhere, at its beginning, or behind every control token as well.
SpacePrefix = Literal["never", "first", "always"]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`byte_level`: tokens are spelled in GPT-2's characters for bytes; else in SentencePiece's, `▁` for a space.
    `composes`: several characters of a text may become one (Unicode's composed forms) before it is cut.
    """

    raw: tokenizers.Tokenizer
    literal: tokenizers.Tokenizer
    inner: tokenizers.Tokenizer
    byte_level: bool
    composes: bool = False
    space_prefix: SpacePrefix = "never"

    def added(self) -> dict[int, AddedToken]:
        """Tokens that are looked for in the text itself, before it is cut into words."""
        added: dict[int, AddedToken] = self.raw.get_added_tokens_decoder()
        return added


def build_pipeline(data: TokenizerData) -> Pipeline:
    """The pipeline of a model.

    Raises:
        ValueError: a kind of tokenizer that is not supported; the message says which are.
        Exception: the library's own, for a broken vocabulary.
    """
    from engine.pipelines import byte_level, sentencepiece, tokenizer_json

    builders = {
        "gpt2": byte_level.build,
        "llama": sentencepiece.build,
        "tokenizer.json": tokenizer_json.build,
    }
    if data.model not in builders:
        raise ValueError(f"model {data.model!r} is not supported (supported: {', '.join(builders)})")
    return builders[data.model](data)


def twin(tokenizer: tokenizers.Tokenizer, added: list[AddedToken], *, literal: bool) -> tokenizers.Tokenizer:
    """Another tokenizer over the same vocabulary, with the tokens `added`, those behind its end in the order of ids.

    `literal`: names of special tokens are ordinary text to it.
    """
    other = tokenizers.Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (value := getattr(tokenizer, part)) is not None:
            setattr(other, part, value)
    other.add_tokens(added)
    other.encode_special_tokens = literal
    return other
