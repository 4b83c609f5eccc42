"""Sampling fields beyond the OpenAI dialect: their ranges, what goes with what, and words that an answer must not hold.

The larger part is beam search, which goes with little else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from backends.protocol import ChatRequest, InvalidRequest
from engine.server.schema import Extras
from engine.types import BeamParams

MAX_LOGPROBS = 20
MAX_BEAMS = 64
_MAX_BAD_WORDS = 1000
BEAM_FIELDS = ("beam_width", "length_penalty", "early_stopping")


class Encoder(Protocol):
    """What bad words need of a tokenizer."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...


def in_range(name: str, value: float, low: float, high: float) -> None:
    """Raises InvalidRequest if a field's value is out of its range; both ends belong to it."""
    if not low <= value <= high:
        raise InvalidRequest(f"'{name}' must be between {low} and {high}, got {value}.", param=name)


def check_sampling(extras: Extras, vocab_size: int, *, stream: bool) -> None:
    """Raises InvalidRequest for a value out of range."""
    if extras.typical_p is not None:
        in_range("typical_p", extras.typical_p, 0, 1)
    if extras.prompt_logprobs is not None:
        in_range("prompt_logprobs", extras.prompt_logprobs, 0, MAX_LOGPROBS)
        if stream:
            raise InvalidRequest("'prompt_logprobs' does not go with 'stream': true.", param="prompt_logprobs")
    words = extras.bad_words or ()
    if len(words) > _MAX_BAD_WORDS:
        raise InvalidRequest(f"'bad_words' has {len(words)} entries; at most {_MAX_BAD_WORDS} go.", param="bad_words")
    for i, word in enumerate(words):
        where = f"bad_words[{i}]"
        if not (word.strip() if isinstance(word, str) else word):
            raise InvalidRequest(f"'{where}' is empty.", param=where)
        for token_id in word if isinstance(word, list) else ():
            in_range(where, token_id, 0, vocab_size - 1)


def bad_word_ids(words: Sequence[str | list[int]], tokenizer: Encoder) -> tuple[tuple[int, ...], ...]:
    """The sequences of tokens to ban: a text as it is written at the beginning of a line and behind a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if isinstance(word, str):
            text = word.lstrip()
            found |= {tuple(tokenizer.encode(begin + text, add_special=False)): None for begin in ("", " ")}
        else:
            found[tuple(word)] = None
    return tuple(found)


def beam_params(
    request: ChatRequest, extras: Extras, *, logprobs: int | None, best_of: int | None
) -> BeamParams | None:
    """The beam search that is asked for, if any. `beam_width` alone asks for it, `use_beam_search` alone for `n` beams.

    Raises:
        InvalidRequest: a value out of range, or a field that makes no sense beside it.
    """
    if extras.use_beam_search is False or (extras.use_beam_search is None and extras.beam_width is None):
        for name in BEAM_FIELDS:
            if getattr(extras, name) is not None:
                raise InvalidRequest(f"'{name}' goes with beam search: give 'use_beam_search': true.", param=name)
        return None
    n = request.n or 1
    width = n if extras.beam_width is None else extras.beam_width
    in_range("beam_width", width, 1, MAX_BEAMS)
    if n > width:
        raise InvalidRequest(f"'n' is {n}, but {width} beams have {width} ends at most.", param="n")
    _refuse_beside_beams(request, extras, logprobs=logprobs, best_of=best_of)
    penalty = 1.0 if extras.length_penalty is None else extras.length_penalty
    in_range("length_penalty", penalty, -10, 10)
    early = False if extras.early_stopping is None else extras.early_stopping
    if isinstance(early, str) and early != "never":
        raise InvalidRequest("'early_stopping' must be true, false or \"never\".", param="early_stopping")
    return BeamParams(width, penalty, early)


def _refuse_beside_beams(request: ChatRequest, extras: Extras, *, logprobs: int | None, best_of: int | None) -> None:
    """Beam search is no sampling: it looks for the likeliest answers as the model has them, and has them at the end."""
    neutral: dict[str, tuple[object, tuple[object, ...]]] = {
        "temperature": (request.temperature, (0, 1)),
        "top_p": (request.top_p, (1,)),
        "top_k": (extras.top_k, (0, -1)),
        "min_p": (extras.min_p, (0,)),
        "typical_p": (extras.typical_p, (1,)),
        "repetition_penalty": (extras.repetition_penalty, (1,)),
        "presence_penalty": (request.presence_penalty, (0,)),
        "frequency_penalty": (request.frequency_penalty, (0,)),
        "logit_bias": (request.logit_bias, ({},)),
        "bad_words": (extras.bad_words, ([],)),
        "min_tokens": (extras.min_tokens, (0,)),
        "seed": (request.seed, ()),
        "stop": (request.stop, ([],)),
        "stream": (request.stream, (False,)),
        "logprobs": (logprobs, ()),
        "prompt_logprobs": (extras.prompt_logprobs, ()),
        "best_of": (best_of, ()),
        "tools": (request.tools, ([],)),
        "response_format": (request.response_format, ({"type": "text"},)),
        "structured_outputs": (extras.structured_outputs, ()),
        **{name: (getattr(extras, name), ()) for name in extras.__struct_fields__ if name.startswith("guided_")},
    }
    for name, (value, harmless) in neutral.items():
        if value is not None and value not in harmless:
            raise InvalidRequest(f"'{name}' does not go with beam search; leave it out.", param=name)
