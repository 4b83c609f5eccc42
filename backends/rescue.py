"""Continue an answer that broke off in the middle: another replica or candidate goes on from the text delivered so far.

It promises that no character is repeated or lost at the seam; that the client sees one answer: the id, model, creation
time and usage of one; that each attempt's own usage reaches the ledger (`Event.usage`); and that what cannot be
continued is not tried, with the reason in the error. Only models with the capability `prefill` are asked, and only for
one choice of plain text: half a tool call, half a JSON document and log probabilities have no seam that would not show.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from backends.attempt import (
    Call,
    Candidate,
    CutKind,
    Event,
    NoBackend,
    StreamCut,
    UpstreamRefused,
)
from backends.attempting import Dispatched, is_final
from backends.chain import Chain
from backends.dialect import CannotTranslate
from backends.openai import chat_event
from backends.protocol import ChatChunk, Json, Usage
from backends.stream import Take

CHARACTERS_PER_TOKEN = 4
LONG_TOKEN_CHARACTERS = 8  # events that are longer than this on average hold several tokens

# Fields of a request that leave its answer without a seam, and what they ask for.
_NO_SEAM: Mapping[str, str] = {
    "tools": "tools",
    "functions": "functions",
    "response_format": "structured output",
    "structured_outputs": "structured output",
    "guided_json": "structured output",
    "guided_regex": "structured output",
    "guided_choice": "structured output",
    "guided_grammar": "structured output",
    "logprobs": "log probabilities",
    "prompt_logprobs": "log probabilities",
    "return_token_ids": "token ids",
    "audio": "audio",
}
_LIMITS = ("max_tokens", "max_completion_tokens")
_NO_TIME: frozenset[CutKind] = frozenset(("total_timeout", "deadline", "too_large"))


class Rescuable(Dispatched):
    """A stream that goes on elsewhere if it breaks. `attempt`, `status` and `headers` are those of the latest part."""

    def __init__(self, first: Dispatched, chain: Chain, call: Call, candidates: Sequence[Candidate]) -> None:
        assert first.stream is not None
        super().__init__(first.attempt, first.status, first.headers, stream=first.stream)
        self._chain = chain
        self._call = call
        self._candidates = candidates
        self._delivered = Delivered()
        self._obstacle = obstacle(call)
        self._seam: Seam | None = None

    @property
    def events(self) -> AsyncIterator[Event]:
        return self

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        """The next event. Raises StreamCut if the stream broke and nobody continued it."""
        while True:
            assert self.stream is not None
            try:
                event = await self.stream.__anext__()
            except StreamCut as cut:
                await self._continue(cut)
                continue
            fitted = event if self._seam is None else self._seam.fit(event)
            if fitted is None:
                continue
            if self._obstacle is None:
                self._obstacle = self._delivered.add(fitted, self._call)
            return fitted

    def pass_on(self, take: Take | None) -> None:
        """As for any answer, until it is continued: from there on every event comes out of `events`."""

        def taken(event: Event) -> bool:
            assert take is not None
            if not take(event):
                return False
            if self._obstacle is None:
                self._obstacle = self._delivered.add(event, self._call)
            return True

        super().pass_on(None if take is None else taken)

    async def _continue(self, cut: StreamCut) -> None:
        """Find somebody who goes on with the answer.

        Raises:
            StreamCut: `cut`, with the reason why it stays.
        """
        why_not = self._obstacle or _obstacle_of(cut)
        if why_not is not None:
            raise _final(cut, f"not continued, because {why_not}") from cut
        text, tokens = self._delivered.text(), self._delivered.tokens()
        here = self.attempt.candidate
        able = [candidate for candidate in self._candidates if candidate.prefill and candidate != here]
        if here.prefill:  # the same model on another replica first, the replica that broke off last
            able.insert(0 if self._chain.elsewhere(here) else len(able), here)
        self._chain.observer.attempt_cut(self.attempt)
        self._chain.broke(here, "timeout" in cut.kind, str(cut))
        try:
            answer = await self._chain.answer(continuation(self._call, text, tokens), able)
        except (NoBackend, UpstreamRefused, CannotTranslate) as error:
            raise _final(cut, f"nobody could continue it: {error}") from cut
        assert answer.stream is not None
        self.attempt, self.status, self.headers = answer.attempt, answer.status, answer.headers
        self.stream = answer.stream
        self.rescued = True
        self._chain.continued(answer.attempt.candidate)
        self._seam = Seam(self._delivered.head, text, tokens)
        self._delivered.next_part()


class Delivered:
    """What the client has of the answer so far. `head` is the first chunk: what it says of the answer holds for all."""

    __slots__ = ("_before", "_characters", "_events", "_parts", "_usage", "head")

    def __init__(self) -> None:
        self.head: ChatChunk | None = None
        self._parts: list[str] = []
        self._before = 0  # tokens of earlier attempts
        self._events = 0
        self._characters = 0
        self._usage: Usage | None = None

    def add(self, event: Event, call: Call) -> str | None:
        """Take account of an event; says what makes it impossible to continue after it, if anything."""
        chunk = event.chunk
        if chunk is None:
            return None
        if self.head is None:
            self.head = chunk
            if call.native is not None and call.native.dialect == event.dialect != "openai":
                return f"it is passed on in the server's own dialect, {event.dialect}"
        if chunk.usage is not None:
            self._usage = event.usage or chunk.usage
        for choice in chunk.choices:
            delta = choice.delta
            if delta.tool_calls or delta.thoughts or delta.refusal:
                return "it holds more than text"
            if delta.content:
                self._parts.append(delta.content)
                self._events += 1
                self._characters += len(delta.content)
            elif not choice.finish_reason and event.dialect == "openai" and _unknown_content(event.data):
                return "it holds more than text"
        return None

    def text(self) -> str:
        return "".join(self._parts)

    def tokens(self) -> int:
        """As the server reported, else counted: servers send a token per event; if events are longer, by characters."""
        if self._usage is not None and self._usage.completion_tokens is not None:
            return self._before + self._usage.completion_tokens
        if self._characters <= LONG_TOKEN_CHARACTERS * self._events:
            return self._before + self._events
        return self._before - (-self._characters // CHARACTERS_PER_TOKEN)

    def next_part(self) -> None:
        """Another attempt goes on from here."""
        self._before = self.tokens()
        self._events = self._characters = 0
        self._usage = None


class Seam:
    """Makes the events of a continuation those of the answer that it continues.

    Whitespace at the end of the delivered text is not part of the prompt (chat templates strip it, some servers refuse
    it, and most tokenizers join it to the next word), so the continuation may begin with it again: it is left out then.
    """

    def __init__(self, head: ChatChunk | None, text: str, tokens: int) -> None:
        self._head = {name: value for name in ("id", "model", "created") if (value := getattr(head, name, None))}
        prefix = text.rstrip()
        self._space = text[len(prefix) :]
        self._tokens = tokens
        self._moved = tokens if prefix else 0  # of the prompt that the server reports

    def fit(self, event: Event) -> Event | None:
        """The event as part of the answer; None if nothing of it is left."""
        chunk = event.chunk
        if chunk is None:  # of a server of another kind, only its end means something here
            return event if event.done or event.dialect == "openai" else None
        fields = msgspec.json.decode(chat_event(event).data)
        fields.update(self._head)
        for name, value in self._head.items():
            setattr(chunk, name, value)
        says = bool(fields.get("usage"))
        for choice, raw in zip(chunk.choices, fields.get("choices") or (), strict=False):
            delta = raw.get("delta") or {}
            delta.pop("role", None)
            choice.delta.role = None
            if choice.delta.content:
                choice.delta.content = delta["content"] = self._without_repeated_space(choice.delta.content)
            says = says or bool(choice.finish_reason) or any(delta.values())
        if not says:
            return None
        own = chunk.usage
        if fields.get("usage"):
            self._whole_usage(fields["usage"])
            with contextlib.suppress(msgspec.ValidationError):  # of odd types: it stays as it came
                chunk.usage = msgspec.convert(fields["usage"], Usage, strict=False)
        data = msgspec.json.encode(fields)
        return Event(b"data: " + data + b"\n\n", data, chunk, usage=own)

    def _without_repeated_space(self, content: str) -> str:
        while self._space and content and content[0] == self._space[0]:
            self._space, content = self._space[1:], content[1:]
        if content:
            self._space = ""
        return content

    def _whole_usage(self, usage: Json) -> None:
        """Of the answer as a whole: what was delivered before is its output, not its prompt. The total stays."""
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not isinstance(prompt, int) or not isinstance(completion, int):
            return
        moved = min(self._moved, prompt)
        usage["prompt_tokens"], usage["completion_tokens"] = prompt - moved, completion + self._tokens
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])


def continuation(call: Call, text: str, tokens: int) -> Call:
    """The call that asks for the rest of an answer of which `text`, `tokens` long, has been delivered."""
    prefix = text.rstrip()
    payload = call.payload
    if prefix != text:  # white space at the end is generated again: it counts once
        tokens = tokens - 1 if prefix else 0
    if prefix:
        messages = list(payload["messages"])
        last = messages[-1] if payload.get("continue_final_message") and messages else {}
        if isinstance(last.get("content"), str):  # the client itself had begun the answer
            messages[-1] = {**last, "content": last["content"] + prefix}
        else:
            messages.append({"role": "assistant", "content": prefix})
        payload = {**payload, "messages": messages}

    def extra(candidate: Candidate) -> Mapping[str, Any]:
        fields = dict(call.extra_for(candidate))
        for name in _LIMITS:
            limit = fields.get(name) or payload.get(name)
            if isinstance(limit, int):
                fields[name] = max(1, limit - tokens)
        least = fields.get("min_tokens") or payload.get("min_tokens")
        if isinstance(least, int):
            fields["min_tokens"] = max(0, least - tokens)
        return fields

    return msgspec.structs.replace(
        call, payload=payload, extra=extra, native=None, continues=bool(prefix) or call.continues
    )


def obstacle(call: Call) -> str | None:
    """What of the request makes its answer impossible to continue, if anything."""
    if call.operation != "chat":
        return f"the operation is '{call.operation}'"
    choices = call.payload.get("n")
    if choices not in (None, 1):
        return f"{choices} choices were asked for"
    for name, what in _NO_SEAM.items():
        value = call.payload.get(name)
        if value and value != {"type": "text"}:
            return f"the request has {what}"
    return None


def _obstacle_of(cut: StreamCut) -> str | None:
    if cut.kind in _NO_TIME:
        return "the time or size that it may have is used up"
    if cut.status is not None and is_final(cut.status):
        return f"the server refused to go on, with status {cut.status}"
    return None


def _final(cut: StreamCut, why: str) -> StreamCut:
    return StreamCut(cut.kind, f"{cut}; {why}", status=cut.status)


def _unknown_content(data: bytes) -> bool:
    """Whether a delta says something in a field that `Delta` does not name, such as `reasoning` or `audio`."""
    choices = msgspec.json.decode(data).get("choices") or ()
    return any(value for choice in choices for name, value in (choice.get("delta") or {}).items() if name != "role")
