"""The shapes of answers: one class per endpoint, both used by `respond.py` in the same way.

A choice is a plain dictionary that is encoded once. `first`, `middle` and `last` are the choices of a stream's chunks,
`whole` is a choice of a complete answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine.server.echo import Echo
from engine.server.model import Model, finite
from engine.server.writer import ReplyWriter
from engine.text.detokenizer import Delta
from engine.types import TokenLogprob

Choice = dict[str, Any]


class Dialect(Protocol):
    """How one endpoint writes its choices. `index` is the number of the choice."""

    id_prefix: str
    object_name: str
    chunk_object_name: str
    prompt_field: str  # of the request

    def take_prompt(self, number: int, entries: Sequence[TokenLogprob]) -> None:
        """Called before anything is written of prompt `number`: the log probabilities of its tokens but the first."""
        ...

    def extra_fields(self) -> dict[str, Any]:
        """Fields beside `choices` in a complete answer and in the first chunk."""
        ...

    def first(self, index: int) -> Choice | None:
        """What is sent before the first token, if anything."""
        ...

    def middle(self, index: int, delta: Delta) -> list[Choice]:
        """What a delta brings; perhaps nothing yet."""
        ...

    def last(self, index: int, delta: Delta) -> Choice: ...

    def whole(self, index: int, delta: Delta) -> Choice: ...

    def reasoning_tokens(self) -> int | None:
        """Of all choices so far; None where there can be none."""
        ...


class _Common:
    def __init__(
        self,
        model: Model,
        *,
        logprobs: bool,
        return_token_ids: bool,
        stop_token_ids: frozenset[int],
        prompt_logprobs: int | None,
    ) -> None:
        self._model = model
        self._prompt_logprobs = prompt_logprobs
        self._scored: dict[int, Sequence[TokenLogprob]] = {}  # the tokens of each prompt but its first
        self._logprobs = logprobs
        self._return_token_ids = return_token_ids
        self._stop_token_ids = stop_token_ids
        self._shows_tokens = logprobs or return_token_ids  # a token without text is news, too

    def take_prompt(self, number: int, entries: Sequence[TokenLogprob]) -> None:
        self._scored[number] = entries

    def _with_extras(self, choice: Choice, delta: Delta) -> Choice:
        """Add vLLM's fields: the token ids if asked for, and what stopped the answer if it was no end token."""
        if self._return_token_ids:
            choice["token_ids"] = delta.token_ids
        if isinstance(delta.stop, str) or delta.stop in self._stop_token_ids:
            choice["stop_reason"] = delta.stop
        return choice


class ChatDialect(_Common):
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    prompt_field = "messages"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(
        self,
        model: Model,
        prompt_token_ids: list[int],
        write: Callable[[], ReplyWriter],
        *,
        thinks: bool,
        **options: Any,
    ) -> None:
        """`write` makes the writer of one answer."""
        super().__init__(model, **options)
        self._prompt_token_ids = prompt_token_ids
        self._writers: defaultdict[int, ReplyWriter] = defaultdict(write)
        self._thinks = thinks

    def extra_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"prompt_token_ids": self._prompt_token_ids} if self._return_token_ids else {}
        if self._prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._model.prompt_logprobs(self._scored[0], self._prompt_logprobs)
        return fields

    def first(self, index: int) -> Choice:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def middle(self, index: int, delta: Delta) -> list[Choice]:
        told = self._writers[index].deltas(delta)
        if not told and self._shows_tokens and delta.token_ids:
            told = [{"content": ""}]  # tokens whose text is held back, or that have none
        choices: list[Choice] = [
            {"index": index, "delta": part, "logprobs": None, "finish_reason": None} for part in told
        ]
        for choice in choices[:1]:  # of all the tokens that came
            choice["logprobs"] = self._logprobs_of(delta)
            if self._return_token_ids:
                choice["token_ids"] = delta.token_ids
        return choices

    def last(self, index: int, delta: Delta) -> Choice:
        reason = self._writers[index].finish_reason(delta.finish_reason)
        choice: Choice = {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}
        return self._with_extras(choice, Delta(stop=delta.stop))

    def whole(self, index: int, delta: Delta) -> Choice:
        writer = self._writers[index]
        writer.deltas(delta)
        choice: Choice = {
            "index": index,
            "message": writer.message(),
            "logprobs": self._logprobs_of(delta),
            "finish_reason": writer.finish_reason(delta.finish_reason),
        }
        return self._with_extras(choice, delta)

    def reasoning_tokens(self) -> int | None:
        return sum(writer.reasoning_tokens for writer in self._writers.values()) if self._thinks else None

    def _logprobs_of(self, delta: Delta) -> dict[str, Any] | None:
        return self._model.chat_logprobs(delta.logprobs) if self._logprobs else None


class CompletionDialect(_Common):
    """`/v1/completions`. With `echo`, each choice begins with its prompt's text."""

    id_prefix = "cmpl-"
    prompt_field = "prompt"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(
        self, model: Model, prompts: list[list[int]], echoes: list[Echo] | None, n: int, **options: Any
    ) -> None:
        super().__init__(model, **options)
        self._prompts = prompts
        self._echoes = echoes
        self._n = n

    def extra_fields(self) -> dict[str, Any]:
        return {}

    def first(self, index: int) -> Choice | None:
        if self._echoes is None and not self._return_token_ids:
            return None
        return self._choice(index, Delta(), self._echo(index), first=True)

    def middle(self, index: int, delta: Delta) -> list[Choice]:
        is_news = delta.text or (self._shows_tokens and delta.token_ids)
        return [self._choice(index, delta, delta.text)] if is_news else []

    def reasoning_tokens(self) -> int | None:
        return None

    def last(self, index: int, delta: Delta) -> Choice:
        return self._with_extras(
            self._choice(index, Delta(finish_reason=delta.finish_reason), ""), Delta(stop=delta.stop)
        )

    def whole(self, index: int, delta: Delta) -> Choice:
        choice = self._choice(index, delta, self._echo(index) + delta.text, first=True)
        return self._with_extras(choice, delta)

    def _choice(self, index: int, delta: Delta, text: str, *, first: bool = False) -> Choice:
        choice: Choice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs_of(index, delta, with_echo=first) if self._logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if first and self._prompt_logprobs is not None:
            scored = self._scored[index // self._n]
            choice["prompt_logprobs"] = self._model.prompt_logprobs(scored, self._prompt_logprobs)
        if self._return_token_ids:
            choice["token_ids"] = delta.token_ids
            if first:
                choice["prompt_token_ids"] = self._prompts[index // self._n]
        return choice

    def _echo(self, index: int) -> str:
        return "" if self._echoes is None else self._echoes[index // self._n].text

    def _logprobs_of(self, index: int, delta: Delta, *, with_echo: bool) -> dict[str, Any]:
        """OpenAI's `logprobs` object of a text completion; `with_echo`, of the prompt first."""
        text = self._model.token_text
        shift = len(self._echo(index))
        entries, offsets = delta.logprobs, [shift + offset for offset in delta.text_offsets]
        first: list[int] = []  # nothing precedes it, so nothing is known of it
        if with_echo and self._echoes is not None:
            number = index // self._n
            first = self._prompts[number][:1]
            entries, offsets = [*self._scored[number], *entries], [*self._echoes[number].offsets, *offsets]
        return {
            "tokens": [text(token_id) for token_id in (*first, *(entry.token_id for entry in entries))],
            "token_logprobs": [*([None] * len(first)), *(finite(entry.logprob) for entry in entries)],
            # The chosen token is always among them, as OpenAI does it.
            "top_logprobs": [
                *([None] * len(first)),
                *(
                    {text(i): finite(value) for i, value in (*entry.top, (entry.token_id, entry.logprob))}
                    for entry in entries
                ),
            ],
            "text_offset": offsets,
        }
