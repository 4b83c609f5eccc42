"""A prompt given back before its answer (`echo`): its text, and where in it each of its tokens begins."""

from __future__ import annotations

from dataclasses import dataclass

from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer
from engine.types import FinishReason


@dataclass(frozen=True, slots=True)
class Echo:
    """`offsets`: of each token of the prompt, in characters of `text`."""

    text: str
    offsets: list[int]


def echo(tokenizer: Tokenizer, token_ids: list[int], given: str | None, *, skip_special: bool) -> Echo:
    """The client's own text where it sent one (`given`), else the text of its token ids."""
    if given is None:
        whole = Detokenizer(tokenizer, skip_special=skip_special).push(token_ids, finish_reason=FinishReason.LENGTH)
        return Echo(whole.text, whole.text_offsets)
    # The text's own control tokens are written in it; the one that the engine puts first is not.
    first = tokenizer.decode(token_ids[:1], skip_special=False)
    added = int(token_ids[:1] == [tokenizer.bos_id] and not given.startswith(first))
    parts = Detokenizer(tokenizer, skip_special=False).push(token_ids[added:], finish_reason=FinishReason.LENGTH)
    return Echo(given, [0] * added + parts.text_offsets)
