"""How many tokens a chat's input has, asked of the server that would answer it.

Anthropic servers count at `/messages/count_tokens`, vLLM and the bundled engine at `/tokenize`, beside `/v1`.
A count changes nothing and costs nothing, so it opens no breaker, is not tried again, and waits for nobody: where it is
not to be had at once, the caller is told why and estimates.
"""

from __future__ import annotations

import time

import msgspec

from backends.anthropic_answer import NAME as ANTHROPIC
from backends.attempt import Call, Candidate
from backends.endpoint import Endpoint
from backends.http import HttpFailure
from backends.pool import Pool

TIMEOUT_S = 5.0
MAX_BYTES = 64 * 1024 * 1024  # `/tokenize` sends the tokens along
# Of the request, what else decides which text the template makes of it.
_SHAPING = ("tools", "add_generation_prompt", "continue_final_message")


class NotCounted(Exception):
    """This server does not count, or not now; the message says why and holds nothing of the prompt."""


class _Counted(msgspec.Struct):
    input_tokens: int | None = None  # Anthropic's word
    count: int | None = None  # vLLM's


_DECODER = msgspec.json.Decoder(_Counted)


async def count_input(pool: Pool, call: Call, candidate: Candidate) -> int:
    """Tokens of the input of `call` as `candidate` reads it, its template's own included.

    Raises:
        NotCounted: no replica is free, or it does not count this.
    """
    replica = pool.acquire()
    if replica is None:
        raise NotCounted(f"every replica of '{pool.name}' is busy or out of rotation")
    try:
        deadline = min(time.monotonic() + TIMEOUT_S, call.deadline or float("inf"))
        request = _request(pool.dialect.name, replica.endpoint, call, candidate)
        exchange = await pool.client.send(
            replica.endpoint.origin, request, connect_s=pool.timeouts.connect_s, deadline=deadline
        )
        try:
            body = await exchange.read_all(MAX_BYTES)
        finally:
            exchange.close()
    except HttpFailure as failure:
        raise NotCounted(str(failure)) from failure
    finally:
        pool.release(replica)
    if exchange.status != 200:
        raise NotCounted(f"'{pool.name}' answers with status {exchange.status}")
    try:
        counted = _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        counted = _Counted()
    tokens = counted.input_tokens if counted.input_tokens is not None else counted.count
    if tokens is None:
        raise NotCounted(f"'{pool.name}' answers with something that is no count")
    return tokens


def _request(dialect: str, endpoint: Endpoint, call: Call, candidate: Candidate) -> bytes:
    model = candidate.upstream_model
    if dialect == ANTHROPIC:
        if call.native is None or call.native.dialect != ANTHROPIC:
            raise NotCounted("only requests in the Anthropic dialect are counted by an Anthropic server")
        body = msgspec.json.encode({**call.native.payload, "model": model})
        return endpoint.post("/messages/count_tokens", body, call.request_id, call.headers)
    shaping = {name: call.payload[name] for name in _SHAPING if name in call.payload}
    body = msgspec.json.encode({"model": model, "messages": call.payload["messages"], **shaping})
    return endpoint.post_beside("/tokenize", body, call.request_id)
