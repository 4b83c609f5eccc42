"""Look through a stream, in one of two ways.

    window  the last characters of each text are held back until they are known to be no part of what is looked for
    hold    all of it is held back until it is whole; where nothing was found it is then given as it came

A rule that denies ends its choice with the finish reason `content_filter`; with a window, text that was given before
stays given. A match longer than the window may be seen only in part: the window must be as long as the longest that
matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backends.attempt import Event
from backends.openai import chat_event, decode_chunk
from backends.protocol import Json
from gateway.accounting import Accounting
from gateway.guarding.answer import HELD_BACK
from gateway.guarding.findings import Findings
from gateway.guarding.request import ask_services, guards_of, report
from gateway.guarding.text import Denied, Text
from gateway.life import Life
from policies.guards import Guard, Guards

if TYPE_CHECKING:
    from gateway.services import Services

_MOST_HELD: Final = 16 * 1024 * 1024  # bytes of events
_TO_THE_END: Final = 1 << 40  # a window that no text is longer than
_FIELDS: Final = ("content", "reasoning_content", "reasoning", "refusal")
_HEAD: Final = ("id", "object", "created", "model", "service_tier", "system_fingerprint")
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode

# A field of a choice, or the arguments of its tool call of that index.
_Where = str | int


class _Choice:
    """`current` is the text that grows now; `given` whether the client has some of its text."""

    def __init__(self) -> None:
        self.texts: dict[_Where, Text] = {}
        self.current: _Where | None = None
        self.given = False
        self.ended = False


class GuardedStream:
    """The events of one answer as the client may have them. `over`: every choice was held back, no more will come."""

    def __init__(self, services: Services, life: Life, accounting: Accounting, guards: Guards) -> None:
        self._services, self._life, self._accounting = services, life, accounting
        self._guards = tuple(guard for guard in guards.after if guard.finders)
        self._asking = [guard for guard in guards.after if guard.rule.check]
        self._window = guards.window
        self._plain = life.asked is not None and life.asked.operation == "completions"  # choices have no delta
        self._choices: dict[int, _Choice] = {}
        self._head: Json = {}
        self._denied: dict[int, Guard] = {}
        self._findings = Findings()
        # With `hold`: what came, how much that is, and the choices that have ended. None: no longer, or never, held.
        self._held: list[Event] | None = [] if guards.streams == "hold" else None
        self._held_bytes = 0
        self._finished: set[int] = set()
        self._as_it_came = False

    @property
    def over(self) -> bool:
        return len(self._denied) >= self._life.choices

    async def events(self, event: Event) -> list[Event]:
        """What can be given once this event has come: none, it, or others in its place."""
        if self._as_it_came:
            return [event]
        if self._held is None:
            return self._through(event)
        self._held.append(event)
        self._held_bytes += len(event.data)
        if event.chunk is not None:
            self._finished.update(choice.index for choice in event.chunk.choices if choice.finish_reason)
        if len(self._finished) < self._life.choices and not event.done and self._held_bytes <= _MOST_HELD:
            return []
        return await self._release()

    def close(self) -> None:
        """Put on record what was found. Once, at the end."""
        for index in self._denied:
            self._life.meter.finish_reasons[index] = HELD_BACK
        report(self._services, self._life, self._accounting, "after", self._findings)

    # -- hold --------------------------------------------------------------------------------------------------------

    async def _release(self) -> list[Event]:
        held, self._held = self._held or [], None
        redacts = False
        for index, texts in self._texts(held).items():
            for text in texts:
                for guard in self._guards:
                    found = guard.find(text)
                    if found:
                        self._findings.add(guard, (finding.kind for finding in found))
                        redacts = redacts or guard.rule.action == "redact"
                        if guard.rule.action == "deny":
                            self._denied.setdefault(index, guard)
            if self._asking and index not in self._denied:
                asked = Findings(kinds=self._findings.kinds, actions=self._findings.actions)
                await ask_services(self._services, self._life, self._asking, "after", texts, asked)
                if asked.denied is not None:
                    self._denied[index] = asked.denied
        if not redacts and not self._denied:
            self._as_it_came = True
            return held
        # From now on only what is to be replaced matters, and it is on record already.
        self._guards = tuple(guard for guard in self._guards if guard.rule.action == "redact")
        self._window = _TO_THE_END
        counted, self._findings = self._findings, Findings()
        out = [given for event in held for given in self._through(event)]
        self._findings = counted
        return out

    def _texts(self, held: list[Event]) -> dict[int, list[str]]:
        """The texts of each choice, whole."""
        texts: dict[int, dict[_Where, list[str]]] = {}
        for event in held:
            if event.chunk is None:
                continue
            for choice in _decode(chat_event(event).data).get("choices") or ():
                of_choice = texts.setdefault(choice.get("index", 0), {})
                for where, holder, name in _pieces(_said(choice)):
                    of_choice.setdefault(where, []).append(holder[name])
        return {index: ["".join(pieces) for pieces in found.values()] for index, found in texts.items()}

    # -- event by event ----------------------------------------------------------------------------------------------

    def _through(self, event: Event) -> list[Event]:
        if event.chunk is None:
            return [event] if event.dialect == "openai" else []  # it is written anew, so another's signs do not fit
        fields = _decode(chat_event(event).data)
        self._head = {name: fields[name] for name in _HEAD if name in fields}
        given = fields.get("choices") or ()
        out: list[Event] = []
        kept = [choice for choice in given if self._keeps(choice, out)]
        if kept or not given or fields.get("usage") is not None:
            out.append(_event({**fields, "choices": kept}, event))
        return out

    def _keeps(self, choice: Json, out: list[Event]) -> bool:
        """Leave in a choice what can be given now; texts that are over go before it. Whether anything is left."""
        index = choice.get("index", 0)
        state = self._choices.setdefault(index, _Choice())
        if state.ended:
            return False
        try:
            if (guard := self._denied.get(index)) is not None:
                raise Denied(guard)
            left = self._pass(index, state, choice, out)
            if choice.get("finish_reason"):
                self._flush(index, state, out)
                state.ended = left = True
        except Denied as denied:
            self._deny(index, state, denied.guard, out)
            return False
        return left

    def _pass(self, index: int, state: _Choice, choice: Json, out: list[Event]) -> bool:
        choice.pop("logprobs", None)  # they would say what is held back
        said = _said(choice)
        left = "role" in said
        for where, holder, name in _pieces(said):
            if where != state.current:
                self._flush(index, state, out)
            state.current = where
            text = state.texts.setdefault(where, Text())
            text.held += holder[name]
            holder[name] = text.take(self._guards, self._window, self._findings)
            state.given = state.given or bool(holder[name])
            # A call that begins is said at once, its arguments as far as they can be.
            left = left or bool(holder[name]) or holder is not said
            if holder is said and not holder[name]:
                del holder[name]
        return left

    def _flush(self, index: int, state: _Choice, out: list[Event]) -> None:
        """Give the rest of the text that is over."""
        where, state.current = state.current, None
        if where is not None and (rest := state.texts[where].take(self._guards, None, self._findings)):
            state.given = True
            out.append(self._piece(index, where, rest))

    def _deny(self, index: int, state: _Choice, guard: Guard, out: list[Event]) -> None:
        state.ended = True
        self._denied[index] = guard
        self._life.meter.finish_reasons[index] = HELD_BACK
        if guard.rule.message and not state.given:
            out.append(self._piece(index, "text" if self._plain else "content", guard.rule.message))
        said: Json = {"text": ""} if self._plain else {"delta": {}}
        out.append(_event({**self._head, "choices": [{"index": index, **said, "finish_reason": HELD_BACK}]}))

    def _piece(self, index: int, where: _Where, text: str) -> Event:
        if where == "text":
            said: Json = {"text": text}
        elif isinstance(where, int):
            said = {"delta": {"tool_calls": [{"index": where, "function": {"arguments": text}}]}}
        else:
            said = {"delta": {where: text}}
        return _event({**self._head, "choices": [{"index": index, **said, "finish_reason": None}]})


def _said(choice: Json) -> Json:
    """Where a choice says something: its delta, or itself in a text completion."""
    delta = choice.get("delta")
    return delta if isinstance(delta, dict) else choice


def _pieces(said: Json) -> Iterator[tuple[_Where, Json, str]]:
    """The texts of a choice: of which field or tool call, and where they stand."""
    for name in (*_FIELDS, "text"):
        if isinstance(said.get(name), str) and said[name]:
            yield name, said, name
    for position, call in enumerate(said.get("tool_calls") or ()):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str) and function["arguments"]:
            yield call.get("index", position), function, "arguments"


def _event(fields: Json, like: Event | None = None) -> Event:
    data = _encode(fields)
    done, usage = (False, None) if like is None else (like.done, like.usage)
    return Event(b"data: " + data + b"\n\n", data, decode_chunk(data), done, usage=usage)


def guarded_stream(services: Services, life: Life, accounting: Accounting) -> GuardedStream | None:
    """What looks through the stream of an answer, where the policy wants that."""
    guards = guards_of(life)
    return GuardedStream(services, life, accounting, guards) if guards is not None and guards.after else None
