"""The wire between the HTTP process and the processes it starts: message types and length-prefixed msgpack frames.

A frame is a 4-byte big-endian length followed by one msgpack message. Both sides run the same code base, so there is no
versioning; a frame that does not decode is a bug and ends the connection. To the core and back no text crosses: prompts
are token ids. To the process of the chat template it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from engine.config import AdapterEntry
from engine.types import FinishReason, SamplingParams, TokenLogprob

MAX_FRAME_BYTES = 256 * 1024 * 1024
_LENGTH_BYTES = 4


class NewRequest(msgspec.Struct, array_like=True, frozen=True):
    """One sequence to generate. Requests with the same `group` continue the same prompt (`n` > 1)."""

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None
    group: int | None = None
    grammar: str | None = None  # what the answer must be, as `engine.grammar` writes it
    prediction: tuple[int, ...] = ()  # what the client expects the answer to be, or to hold
    adapter: int = 0  # the id of a loaded adapter; 0: none
    tenant: str = ""  # tenants share the engine fairly
    priority: int = 0  # smaller is more urgent
    deadline: float | None = None  # `time.monotonic()`, which both processes share, when the whole answer must be there
    pages_from: str | None = None  # the engine that has computed its prompt, one of `EngineConfig.kv_peers`


class Add(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Admit all of these requests or none of them."""

    requests: list[NewRequest]


class Abort(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """End these requests now. `stopped`: their answer is complete (a stop string matched), nobody gave up."""

    request_ids: list[int]
    stopped: bool = False


class Recall(msgspec.Struct, array_like=True, tag=8, frozen=True):
    """Give back those of these parties, each as it was added, of which nothing was computed yet."""

    parties: list[list[int]]


class Ping(msgspec.Struct, array_like=True, tag=3, frozen=True):
    number: int


class Output(msgspec.Struct, array_like=True):
    """What one step yielded for one request. With `finish_reason` set it is the request's last output."""

    request_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    # The token that ended the request, if it is one of the end-of-sequence or stop tokens.
    stop_token_id: int | None = None
    # Prompt tokens found in the prefix cache; with the first output only.
    cached_tokens: int | None = None
    error: str | None = None
    # The last full page of the prompt; with the first output only.
    prompt_page: bytes | None = None
    # Drafts that became part of the answer, and those that did not.
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    # Of the prompt's next tokens, in order: they come with the chunks in which the prompt is computed.
    prompt_logprobs: list[TokenLogprob] | None = None
    tokens_beside: int = 0  # generated for this answer and not part of it: beams that led nowhere
    vector: bytes | None = None  # of a pooled text, float32, little-endian
    missed: str | None = None  # why full pages of the prompt were not found; with `cached_tokens`


class Stats(msgspec.Struct, array_like=True):
    """A snapshot of the core. Counters are cumulative since the core started."""

    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_used: int = 0
    running: int = 0
    waiting: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_evicted_pages: int = 0
    aborts: int = 0
    step_failures: int = 0
    late_kernels: int = 0  # GPU kernels compiled after warm-up, while requests waited
    draft_runs: int = 0  # one request's drafts in one step
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0
    prefix_missed_tokens: dict[str, int] = {}  # by `Absence`
    kv_loads: dict[str, int] = {}  # by how they ended
    kv_tiers: dict[str, dict[str, int]] = {}  # by the tier's name, see `Tiers.counts`
    step_token_budget: int = 0  # tokens of a step in which answers are being written, at most

    @property
    def rejected_draft_tokens(self) -> int:
        return self.drafted_tokens - self.accepted_draft_tokens


class Step(msgspec.Struct, array_like=True, tag=11):
    """One turn of the loop: outputs, a snapshot, and how long the step took (None: no step was run)."""

    outputs: list[Output]
    stats: Stats
    step_seconds: float | None = None


class Rejected(msgspec.Struct, array_like=True, tag=12, frozen=True):
    """An `Add` that was refused as a whole. With `retry_after_seconds` it may be tried again, otherwise never."""

    request_ids: list[int]
    message: str
    retry_after_seconds: float | None = None


class Recalled(msgspec.Struct, array_like=True, tag=20, frozen=True):
    """These requests are not here any more; nothing will come for them."""

    request_ids: list[int]


class Pong(msgspec.Struct, array_like=True, tag=13, frozen=True):
    number: int
    # None: no step was run yet.
    last_step_age_seconds: float | None


class Ready(msgspec.Struct, array_like=True, tag=14, frozen=True):
    """The model is loaded."""

    pid: int
    max_total_tokens: int
    num_blocks: int
    block_size: int
    bytes_per_token: int
    model_digest: str
    load_seconds: float
    page_space: str = ""  # pages of engines that say the same here can be compared; empty: there is no prefix cache
    offered_at: str = ""  # where other engines fetch its pages; empty: nowhere


class Pages(msgspec.Struct, array_like=True, tag=16, frozen=True):
    """Pages that left the prefix cache, and then those that came into it, each with the page before it."""

    removed: list[bytes]
    stored: list[tuple[bytes, bytes]]


class Fatal(msgspec.Struct, array_like=True, tag=15, frozen=True):
    """The core cannot go on; it exits after this message."""

    message: str


class LoadAdapter(msgspec.Struct, array_like=True, tag=6, frozen=True):
    """Load an adapter beside the running steps; `AdapterLoaded` or `AdapterFailed` answers."""

    entry: AdapterEntry


class UnloadAdapter(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """Let an adapter go when its last request has ended; `AdapterGone` answers. No request may name it any more."""

    adapter_id: int


class AdapterLoaded(msgspec.Struct, array_like=True, tag=21, frozen=True):
    """Requests may name it. `digest`: of its content, hex."""

    adapter_id: int
    digest: str
    rank: int
    num_bytes: int


class AdapterFailed(msgspec.Struct, array_like=True, tag=22, frozen=True):
    """It is not there, and why."""

    adapter_id: int
    message: str


class AdapterGone(msgspec.Struct, array_like=True, tag=23, frozen=True):
    """Its memory is free."""

    adapter_id: int


class Template(msgspec.Struct, array_like=True, frozen=True):
    """What the process of the chat template is to render from now on; it answers with a `Rendered` of no text."""

    source: str
    bos_token: str
    eos_token: str
    tool_source: str | None = None  # for conversations with tools, where it is another


class Conversation(msgspec.Struct, array_like=True, frozen=True):
    """Messages for the chat template; `variables` are further names that it may read."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    variables: dict[str, Any] | None
    most_characters: int  # a longer text is of no use
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None


class Rendered(msgspec.Struct, array_like=True, frozen=True):
    """A text, or why there is none: `error`, or its length where that is more than was asked for."""

    text: str = ""
    error: str | None = None
    too_long: int | None = None


ToCore = Add | Abort | Recall | Ping | LoadAdapter | UnloadAdapter
FromCore = Step | Rejected | Recalled | Pong | Ready | Pages | Fatal | AdapterLoaded | AdapterFailed | AdapterGone

_encoder = msgspec.msgpack.Encoder()
to_core_decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
from_core_decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)


def encode_frame(message: msgspec.Struct) -> bytes:
    """The bytes of one frame.

    Raises:
        ValueError: the message is larger than `MAX_FRAME_BYTES`.
    """
    frame = bytearray(_LENGTH_BYTES)
    _encoder.encode_into(message, frame, _LENGTH_BYTES)
    length = len(frame) - _LENGTH_BYTES
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes is larger than the limit of {MAX_FRAME_BYTES}")
    frame[:_LENGTH_BYTES] = length.to_bytes(_LENGTH_BYTES, "big")
    return bytes(frame)


class FrameReader:
    """Cuts a byte stream into the payloads of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield every payload that `data` completes.

        Raises:
            ValueError: a frame announces more than `MAX_FRAME_BYTES`.
        """
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH_BYTES:
            length = int.from_bytes(self._buffer[start : start + _LENGTH_BYTES], "big")
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame announces {length} bytes, more than the limit of {MAX_FRAME_BYTES}")
            end = start + _LENGTH_BYTES + length
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[start + _LENGTH_BYTES : end])
            start = end
        del self._buffer[:start]
