"""One answer on the HTTP side: what was asked, the text that has come so far, and the ways in which it can fail.

The client fills an `Answer` as outputs arrive (so a stop string ends generation at once, however slow the reader is);
the server iterates over it. News that nobody has fetched yet is merged, so an answer holds its own text at most once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from engine.messages import NewRequest, Output
from engine.text.detokenizer import Delta, Detokenizer
from engine.types import FinishReason, SamplingParams, TokenLogprob


class EngineError(Exception):
    """Why an answer could not be given."""


class PromptRejected(EngineError):
    """The engine can never serve this request."""


class EngineBusy(EngineError):
    """The waiting queue is full; try again after `retry_after_seconds`."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EngineDown(EngineError):
    """The core is starting, was lost or does not answer."""


class GenerationFailed(EngineError):
    """The model failed on this request, or on the step that it was part of."""


class AdapterMissing(EngineError):
    """The adapter that this was to run with is not served."""


class DeadlineMissed(EngineError):
    """The answer did not come before the request's deadline, or could not have."""


class AnswerAborted(EngineError):
    """The answer was given up by its reader."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One sequence to generate, with the state that turns its tokens into text."""

    prompt_token_ids: list[int]
    params: SamplingParams
    detokenizer: Detokenizer
    cache_salt: str | None = None
    group: int | None = None  # the same number for all `n` answers to one prompt
    grammar: str | None = None  # what the answer must be, a checked one
    prediction: tuple[int, ...] = ()  # what the client expects the answer to be, or to hold
    adapter: str | None = None  # the name of the one that it runs with
    tenant: str = ""  # tenants share the engine fairly
    priority: int = 0  # smaller is more urgent
    deadline: float | None = None  # `time.monotonic()` when the whole answer must be there
    pages_from: str | None = None  # the address of the engine that has computed the prompt

    def request(self, request_id: int, adapter_id: int) -> NewRequest:
        """What the core is told of it."""
        return NewRequest(
            request_id,
            self.prompt_token_ids,
            self.params,
            self.cache_salt,
            self.group,
            self.grammar,
            self.prediction,
            adapter_id,
            self.tenant,
            self.priority,
            self.deadline,
            self.pages_from,
        )


class Answer:
    """One answer being generated. Iterate over it; each item is what came since the last one."""

    def __init__(self, request_id: int, generation: Generation) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = len(generation.prompt_token_ids)
        self.cached_tokens = 0
        self.prompt_page: bytes | None = None
        self.missed: str | None = None  # why the rest of the prompt was not in the prefix cache
        self.accepted_drafts = 0
        self.rejected_drafts = 0
        self.prompt_logprobs: list[TokenLogprob] = []
        self.tokens_beside = 0  # generated for this answer, but not part of it
        self.end_reason: str | None = None  # a finish reason, or "abort", "error", "deadline", "rejected"
        self._detokenizer = generation.detokenizer
        self._news: Delta | None = None
        self._error: EngineError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._created = time.monotonic()
        self._first_token: float | None = None
        self._last_token = self._created

    @property
    def num_generated_tokens(self) -> int:
        """Tokens so far, those that ended the answer included."""
        return self._detokenizer.num_tokens

    @property
    def seconds_to_first_token(self) -> float | None:
        return None if self._first_token is None else self._first_token - self._created

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time per token after the first; None with fewer than two."""
        if self._first_token is None or self.num_generated_tokens < 2:
            return None
        return (self._last_token - self._first_token) / (self.num_generated_tokens - 1)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """Wait for news.

        Raises:
            EngineError: the answer cannot be completed; text that came before is delivered first.
            StopAsyncIteration: the answer is complete and was delivered.
        """
        while self._news is None:
            if self._error is not None:
                raise self._error
            if self.end_reason is not None:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        news, self._news = self._news, None
        return news

    def take(self, output: Output) -> bool:
        """Turn an output of the core into text; True if a stop string matched, so that the core must end it."""
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
            self.prompt_page = output.prompt_page
            self.missed = output.missed
        self.prompt_logprobs += output.prompt_logprobs or ()
        self.tokens_beside += output.tokens_beside
        self.accepted_drafts += output.accepted_drafts
        self.rejected_drafts += output.rejected_drafts
        if output.finish_reason is FinishReason.ERROR:
            self.fail(GenerationFailed(output.error or "The engine reported an error without a message."), "error")
            return False
        if output.finish_reason is FinishReason.DEADLINE:
            self.fail(DeadlineMissed(output.error or "The request's deadline passed."), "deadline")
            return False
        if output.token_ids:
            self._last_token = time.monotonic()
            if self._first_token is None:
                self._first_token = self._last_token
        delta = self._detokenizer.push(output.token_ids, output.logprobs, output.finish_reason, output.stop_token_id)
        if delta.finish_reason is not None:
            self.end_reason = delta.finish_reason
        elif not delta.token_ids and not delta.text:
            return False
        if self._news is None:
            self._news = delta
        else:
            self._news.merge(delta)
        self._wake()
        return delta.finish_reason is not None and output.finish_reason is None

    def fail(self, error: EngineError, end_reason: str) -> None:
        """End with an error."""
        self.end_reason = end_reason
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
