"""A streamed answer: read until it is committed, then event by event; one clean end, many broken ones told apart.

It promises that a stream ends without an exception only if the server finished its answer: with a finish reason for
every choice, or with `[DONE]` if it is a server that has never given a reason. It promises further that events that
arrived before a break are delivered before it is reported; and that an event costs no timer and no task. A stream is
committed at its first content: what came before is held back until then.

Some servers give a finish reason with every piece of text. An event that has one is therefore held back until the next
thing happens: if the choice goes on, its reason is taken out. At such a server a reason beside text proves nothing, so
only `[DONE]`, a reason without text or a well-formed end of the body ends the answer there.
"""

from __future__ import annotations

from collections.abc import Callable

from backends.attempt import AttemptFailed, CutKind, Event, Outcome, StreamCut
from backends.connection import Exchange, HttpFailure
from backends.dialect import MalformedAnswer, Reader
from backends.protocol import ChatChunk
from backends.repair import has_text, without_reasons
from backends.sse import EventTooLarge, SseParser

# After its last finish reason a server has this long to send usage and [DONE]; without them the answer is still whole.
AFTER_FINISH_S = 5.0

_CUT_KINDS: dict[str, CutKind] = {
    "disconnected": "disconnected",
    "between_tokens_timeout": "between_tokens_timeout",
    "total_timeout": "total_timeout",
    "deadline": "deadline",
    "too_large": "too_large",
    "upstream_error": "upstream_error",
    "rate_limited": "upstream_error",
    "overloaded": "upstream_error",
}

# Called once: the outcome, and for a broken stream the reason.
OnEnd = Callable[[Outcome, AttemptFailed | None], None]
# Passes an event on, or says by False that it cannot now.
Take = Callable[[Event], bool]


class EventStream:
    """Events of one exchange. Iterate it after `commit`; `aclose` it whatever happens."""

    def __init__(
        self,
        exchange: Exchange,
        reader: Reader,
        between_tokens_s: float,
        choices: int,
        on_end: OnEnd,
        *,
        gives_reasons: bool = False,
        repeats_reasons: bool = False,
    ) -> None:
        self._exchange = exchange
        self._reader = reader
        self._between_tokens_s = between_tokens_s
        self._choices = choices  # how many must finish
        self._gives_reasons = gives_reasons
        self.repeats_reasons = repeats_reasons  # the server has been seen to go on after a finish reason
        self._doubtful = False  # the latest reason stood beside text, at such a server
        self._held: Event | None = None  # it has a finish reason, and nothing came after it yet
        self._on_end: OnEnd | None = on_end
        self._parser = SseParser()
        self._ready: list[Event] = []  # those of one piece: an empty list is a tenth of an empty deque
        self._finished: set[int] = set()
        self._over = False  # the server needs to send nothing more
        self._progressed = True  # an event since the latest wait did more than keep the connection alive
        self._failure: AttemptFailed | None = None
        self._committed = False
        self._pass: Take | None = None
        self._fault: Exception | None = None  # of `_pass`

    async def commit(self) -> None:
        """Wait for the first content. Raises AttemptFailed if the stream breaks, ends or reports an error before it."""
        while not self._committed:
            await self._fill()
            if self._failure is not None and not self._committed:
                raise self._failure
        self._exchange.quiet_kind = "between_tokens_timeout"

    @property
    def finished(self) -> bool:
        """Whether every choice has said why it ended."""
        return len(self._finished) >= self._choices and not self._doubtful

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        """The next event. Raises StreamCut if the stream broke before the answer was whole."""
        ready = self._ready
        if not ready:
            if self._over:
                raise StopAsyncIteration
            self._be_patient()
            while not ready and self._failure is None and not self._over:
                await self._fill()
            if not ready:
                self._stop()
        event = ready.pop(0)
        if not event.idle:
            self._progressed = True
        return event

    def pass_on(self, take: Take | None) -> None:
        """From now on, offer each event to `take` when the iteration waits for one: no task wakes up for what arrives.

        An event that `take` does not want comes out of the iteration, as do those behind it until that waits again; and
        what `take` raises is raised there. None: offer no more.
        """
        self._pass = take
        self._exchange.tap = None if take is None else self._tapped

    async def aclose(self) -> None:
        """Give up what has not arrived yet; the server sees its connection close at once. May be called again."""
        self._end("cancelled", None)
        self._over = True
        self._held = None
        self._ready.clear()
        if not self._exchange.draining:  # after [DONE] the body's own end is awaited, to keep the connection
            self._exchange.close()

    def _be_patient(self) -> None:
        """Say how long the next event may take. Once per event and not per piece: a sign of life is no token."""
        if self._progressed:
            self._progressed = False
            self._exchange.patience_s = AFTER_FINISH_S if self._finished and self.finished else self._between_tokens_s
            self._exchange.moved = True

    def _stop(self) -> None:
        """Nothing is left to deliver: end cleanly or report the break."""
        failure, self._over = self._failure, True
        if failure is None or self.finished:
            raise StopAsyncIteration
        raise StreamCut(_CUT_KINDS.get(failure.kind, "protocol"), str(failure), status=failure.status)

    async def _fill(self) -> None:
        """Read one piece and take its events."""
        exchange = self._exchange
        while not exchange.ready():
            await exchange.changed()
            if self._fault is not None:
                raise self._fault
            if self._ready or self._over or self._failure is not None:
                return  # left by `_tapped`
        try:
            piece = await exchange.read()
        except HttpFailure as failure:
            self._fail(AttemptFailed.by(failure))
            return
        self._feed(piece)
        if self._pass is not None:
            self._offer(self._pass)
            if self._fault is not None:
                raise self._fault

    def _tapped(self, piece: bytes) -> bool:
        """Take the events of a piece that arrived while the iteration waits, and pass on what can be passed on."""
        if self._ready or self._pass is None or self._fault is not None:
            return False
        self._feed(piece)
        self._offer(self._pass)
        if self._ready or self._over or self._failure is not None or self._fault is not None:
            self._exchange.wake()
        return True

    def _offer(self, take: Take) -> None:
        """Pass on what is ready, up to an event that `take` does not want."""
        ready = self._ready
        try:
            while ready and take(ready[0]):
                if not ready.pop(0).idle:
                    self._exchange.moved = True
        except Exception as fault:
            self._fault = fault

    def _feed(self, piece: bytes) -> None:
        """Take the events of a piece of the body, which is empty at its end."""
        try:
            for parsed in self._parser.feed(piece) if piece else self._parser.close():
                event = self._reader.read(parsed)
                if event is None:
                    continue
                if event.plain and self._committed and self._held is None:
                    self._ready.append(event)
                    continue
                self._take(event)
                if self._over or self._failure is not None:
                    return
        except AttemptFailed as failure:
            self._fail(failure)
            return
        except (EventTooLarge, MalformedAnswer) as error:
            self._fail(AttemptFailed("protocol", str(error)))
            return
        if not piece:
            self._doubtful = False
            self._fail(AttemptFailed("disconnected", "the stream ended before the answer was whole"))

    def _take(self, event: Event) -> None:
        if self._held is not None and not event.idle:
            self._release(event.chunk)
        ends = False
        if event.chunk is not None:
            for choice in event.chunk.choices:
                if choice.finish_reason:
                    ends = True
                    self._finished.add(choice.index)
            if not self._committed:
                self._committed = self._reader.commits(event)
        if not event.done:
            if ends and event.dialect == "openai":
                self._hold(event)
            else:
                self._ready.append(event)
            return
        self._doubtful = False
        if not self._committed:
            self._fail(AttemptFailed("upstream_error", "the stream was finished before any content came"))
        elif self._gives_reasons and not self.finished:  # something between us and the server tidied up after it
            self._fail(AttemptFailed("upstream_error", "the stream was finished without a finish reason"))
        else:
            self._ready.append(event)
            self._over = True
            self._exchange.finish()
            self._end("success", None)

    def _hold(self, event: Event) -> None:
        """Keep an event with a finish reason until it is known whether more comes."""
        assert event.chunk is not None
        self._held = event
        self._doubtful = self.repeats_reasons and any(map(has_text, event.chunk.choices))
        if self._committed and self.finished:
            self._exchange.patience_s, self._exchange.moved = AFTER_FINISH_S, True

    def _release(self, next_chunk: ChatChunk | None) -> None:
        """Deliver the held event; without its reason for a choice that goes on in the chunk after it."""
        held, self._held = self._held, None
        assert held is not None
        assert held.chunk is not None
        ended = {choice.index for choice in held.chunk.choices if choice.finish_reason}
        more = next_chunk.choices if next_chunk is not None else ()
        gone_on = {c.index for c in more if c.index in ended and (c.finish_reason or has_text(c))}
        if gone_on:
            self.repeats_reasons = True
            self._finished -= gone_on
            self._exchange.patience_s = self._between_tokens_s  # it was shorter when the answer seemed to have ended
            held = without_reasons(held, gone_on)
        self._ready.append(held)

    def _fail(self, failure: AttemptFailed) -> None:
        self._failure = failure
        if self._held is not None:
            held, self._held = self._held, None
            self._ready.append(without_reasons(held, self._finished) if self._doubtful else held)
        self._exchange.close()
        if not self._committed:
            return  # the caller of `commit` decides what comes next
        if self.finished:
            self._end("success", None)
        else:
            self._end(failure.outcome if failure.outcome == "timeout" else "cut", failure)

    def _end(self, outcome: Outcome, failure: AttemptFailed | None) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(outcome, failure)
