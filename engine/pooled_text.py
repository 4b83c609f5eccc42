"""One text on its way to a vector, on the HTTP side: in place of the `Answer` of a text that is to be continued."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from engine.messages import NewRequest, Output
from engine.text.answer import DeadlineMissed, EngineError, GenerationFailed
from engine.types import FinishReason, SamplingParams, Vector


@dataclass(frozen=True, slots=True)
class Turn:
    """What decides when a text is computed, and whose pages it may share; see `NewRequest`."""

    cache_salt: str | None = None
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None

    def request(self, request_id: int, prompt_token_ids: list[int]) -> NewRequest:
        """What the core is told of a text."""
        return NewRequest(
            request_id,
            prompt_token_ids,
            SamplingParams(),
            self.cache_salt,
            tenant=self.tenant,
            priority=self.priority,
            deadline=self.deadline,
        )


class PooledText:
    """`result` is the vector; await it shielded, it is not the reader's to cancel."""

    # There is no token to be timed.
    num_generated_tokens = 0
    seconds_to_first_token: float | None = None
    seconds_per_token: float | None = None

    def __init__(self, request_id: int, num_prompt_tokens: int) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.cached_tokens = 0
        self.end_reason: str | None = None  # a finish reason, or "abort", "error", "rejected"
        self.result: asyncio.Future[Vector] = asyncio.get_running_loop().create_future()
        # Who waits for another text of the same request may never ask for this one.
        self.result.add_done_callback(lambda result: result.cancelled() or result.exception())

    def take(self, output: Output) -> bool:
        """Take over an output of the core. False: nothing is left that the core must be told to end."""
        if output.finish_reason is FinishReason.DEADLINE:
            self.fail(DeadlineMissed(output.error or "The request's deadline passed."), "deadline")
            return False
        if output.finish_reason is FinishReason.ERROR or output.vector is None:
            self.fail(GenerationFailed(output.error or "The engine gave no vector and no reason."), "error")
            return False
        self.cached_tokens = output.cached_tokens or 0
        self.end_reason = output.finish_reason
        self.result.set_result(np.frombuffer(output.vector, dtype="<f4"))
        return False

    def fail(self, error: EngineError, end_reason: str) -> None:
        """End with an error."""
        self.end_reason = end_reason
        self.result.set_exception(error)
