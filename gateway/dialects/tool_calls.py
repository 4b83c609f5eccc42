"""Tool calls one after another, for dialects that say each as a whole before the next begins.

In chat completions the pieces of several calls may come interleaved. It promises that a call which begins when the one
before it has its arguments, as nearly all do, is passed on at once; that any other waits until that one has them, or
nothing more can come; and that what waits is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from backends.attempt import StreamCut
from backends.protocol import FunctionCall, ToolCall

MAX_HELD = 1 << 20  # characters of arguments that wait, each piece counted with what it costs besides
PIECE = 64

_decode = msgspec.json.Decoder(msgspec.Raw).decode


class CallOrder:
    """The calls of one streamed answer, told apart by their index."""

    __slots__ = ("_arguments", "_held", "_later", "_now")

    def __init__(self) -> None:
        self._now = -1  # index of the call that is passed on
        self._arguments: list[str] = []  # of that call, so far
        self._later: dict[int, tuple[ToolCall, list[str]]] = {}  # calls that wait: the first piece and the arguments
        self._held = 0

    def take(self, call: ToolCall) -> Sequence[ToolCall]:
        """Take a piece of a call; returns the pieces that are to be passed on now, in their order.

        Raises:
            StreamCut: it belongs to a call that was over, or more would wait than may.
        """
        if call.index is None:
            call.index = max(self._now, *self._later, 0)
        number, said = call.index, (call.function and call.function.arguments) or ""
        if number == self._now:
            self._arguments.append(said)
            return (call,)
        if number < self._now:
            if said.strip():
                raise StreamCut("protocol", "the backend went on with a tool call that was over")
            return ()
        begins = number not in self._later
        self._later.setdefault(number, (call, []))[1].append(said)
        self._held += PIECE + len(said)
        out: list[ToolCall] = []
        while begins and self._later and (self._now < 0 or self._whole()):
            out.append(self._next())
        if self._held > MAX_HELD:
            raise StreamCut("too_large", "the backend mixed the arguments of tool calls that are too large to wait")
        return out

    def rest(self) -> Sequence[ToolCall]:
        """Everything that waits, because nothing more comes for the calls before it."""
        out: list[ToolCall] = []
        while self._later:
            out.append(self._next())
        return out

    def _next(self) -> ToolCall:
        """The first call that waits, with all that has come of it."""
        self._now = min(self._later)
        call, self._arguments = self._later.pop(self._now)
        said = "".join(self._arguments)
        self._held -= PIECE * len(self._arguments) + len(said)
        function = FunctionCall(name=call.function.name if call.function else None, arguments=said)
        return ToolCall(id=call.id, type=call.type, function=function, index=self._now)

    def _whole(self) -> bool:
        """Whether the call that is passed on has its arguments."""
        try:
            _decode("".join(self._arguments).encode("utf-8", "surrogatepass"))
        except msgspec.DecodeError:
            return False
        return True
