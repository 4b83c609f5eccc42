"""A prompt computed here for an answer that another engine gives, and on the other side what a request says of that.

    gateway ── the request ──→ prefilling engine      its pages, and where they are
    gateway ── the request, and where its pages are ──→ decoding engine ── fetches them, answers

What a request says is a hint: an engine that does not find the pages there computes them itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers

from backends.protocol import PAGES_FROM_HEADER, PREFILLED_HEADER, Json, whole_number
from engine.client import EngineClient
from engine.config import Role
from engine.server.errors import ApiError
from engine.server.respond import Arrival, Job
from engine.text.answer import Generation
from engine.types import SamplingParams

_GREEDY = SamplingParams(temperature=0.0, max_tokens=1)  # the one token is thrown away


class Prefill:
    """Computes the prompts of a request's body, and says where their pages are."""

    def __init__(self, client: EngineClient, make_job: Callable[[bytes, str], Awaitable[Job]]) -> None:
        self._client = client
        self._make_job = make_job

    async def __call__(self, raw: bytes, arrival: Arrival) -> Json:
        """Raises what `as_api_error` knows; cancelling it ends the work."""
        job = (await self._make_job(raw, "")).arrived(arrival)
        answers = self._client.generate([_prompt_only(g) for g in job.generations[:: job.best_of]])
        try:
            for answer in answers:
                async for _ in answer:
                    pass
        finally:
            self._client.abort(answers)
        prompt = sum(answer.num_prompt_tokens for answer in answers)
        cached = sum(answer.cached_tokens for answer in answers)
        page = answers[0].prompt_page if len(answers) == 1 else None
        ready = self._client.ready
        return {
            "object": "prefill",
            "model": job.model_name,
            "pages_at": (ready.offered_at if ready is not None else "") or None,
            "prompt_page": None if page is None else page.hex(),
            "usage": {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}},
        }


def _prompt_only(generation: Generation) -> Generation:
    return dataclasses.replace(generation, params=_GREEDY, group=None, grammar=None, prediction=())


def refusals(role: Role, name: str) -> tuple[ApiError | None, ApiError | None]:
    """Why an engine of this role gives no answers, and why it computes no prompts for others; None: it does."""
    answers = prefills = None
    if role == "prefill":
        text = f"This engine computes prompts of '{name}' for others: use /v1/prefill/… or another engine."
        answers = ApiError(400, text, code="wrong_role")
    if role == "decode":
        prefills = ApiError(
            400, f"This engine answers with '{name}', and computes nothing for others.", code="wrong_role"
        )
    return answers, prefills


def computed_elsewhere(job: Job, headers: Headers) -> Job:
    """The job of a request with these headers.

    Raises:
        ApiError: one of them is not what it should be.
    """
    tokens = headers.get(PREFILLED_HEADER)
    number = 0 if tokens is None else whole_number(tokens, 9)
    if number is None:
        raise ApiError(400, f"'{PREFILLED_HEADER}' must be a number of tokens.", code="invalid_value")
    job = dataclasses.replace(job, prefilled_tokens=number)
    address = headers.get(PAGES_FROM_HEADER)
    if address is None:
        return job
    return dataclasses.replace(job, generations=[dataclasses.replace(g, pages_from=address) for g in job.generations])
