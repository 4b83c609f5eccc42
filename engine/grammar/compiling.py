"""Grammar texts to the state that a request carries: compiled within bounds, kept by content, copied per request.

The bounds are those of llguidance itself (work, states, size), so what compiles in the checking process compiles in the
core, too. `Grammars` does it beside the core's loop: it asks for a grammar, goes on, and is woken when it is there.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Protocol, cast

import llguidance
import msgspec

from engine.grammar.state import GrammarState
from engine.types import GrammarFailed

# Bounds of work, in the library's units: a fifth of a second to begin with, some 10 ms for the mask of one token.
_START_FUEL, _STEP_FUEL, _STEP_ITEMS = 200_000, 50_000, 20_000
# A state of a lexer takes 1 to 2 KiB, and every running request has a lexer of its own.
_MAX_LEXER_STATES = 20_000
MAX_CHARACTERS = 1 << 18
_KEPT = 64
_LONGEST_REASON = 400
# Before the names of control tokens: no byte of any text, so a grammar's texts never match them.
_NO_TEXT = b"\xff"


class GrammarError(ValueError):
    """No grammar, or one that takes too much work. The message is the compiler's."""


class Tokens(Protocol):
    """The part of a tokenizer that grammars look at."""

    vocab_size: int
    special_ids: frozenset[int]
    end_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes: ...


class Vocabulary(msgspec.Struct, array_like=True, frozen=True):
    """What a grammar must know of a tokenizer."""

    tokens: list[bytes]
    control_ids: list[int]
    end_ids: list[int]
    size: int  # of the model's output, which may be longer than `tokens`

    @classmethod
    def of(cls, tokenizer: Tokens, size: int) -> Vocabulary:
        """That of a tokenizer, for a model with an output of `size`."""
        tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        return cls(tokens, sorted(tokenizer.special_ids), sorted(tokenizer.end_ids), size)


class Compiler:
    """Compiles for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises GrammarError for a vocabulary in which nothing ends an answer."""
        if not vocabulary.end_ids:
            raise GrammarError("the model has no token that ends an answer")
        control = set(vocabulary.control_ids)
        tokens = [_NO_TEXT + text if i in control else text for i, text in enumerate(vocabulary.tokens)]
        source = _Source(tokens, vocabulary)
        self._tokenizer = llguidance.LLTokenizer(
            cast(llguidance.TokenizerWrapper, source), n_vocab=vocabulary.size, eos_token=vocabulary.end_ids
        )
        self._limits = llguidance.LLParserLimits(
            initial_lexer_fuel=_START_FUEL,
            step_lexer_fuel=_STEP_FUEL,
            step_max_items=_STEP_ITEMS,
            max_lexer_states=_MAX_LEXER_STATES,
            verbose_errors=False,
        )

    def compile(self, text: str) -> GrammarState:
        """The state before the first token.

        Raises:
            GrammarError: the text is no grammar, nothing matches it, or it takes too much work.
        """
        if len(text) > MAX_CHARACTERS:
            raise GrammarError(f"it has {len(text)} characters; at most {MAX_CHARACTERS} are compiled")
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(_reason(matcher.get_error()))
        mask = matcher.compute_bitmask()  # where nothing matches, that shows here
        if matcher.is_error():
            raise GrammarError("nothing that can be generated matches it")
        state = GrammarState(matcher)
        try:  # where the first token takes too much work, every answer would fail
            state.copy().accept([_first(mask)])
        except GrammarFailed as error:
            raise GrammarError(str(error)) from None
        return state


class _Source:
    """The form in which llguidance takes a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, tokens: list[bytes], vocabulary: Vocabulary) -> None:
        self.tokens = tokens
        self.special_token_ids = vocabulary.control_ids
        self.eos_token_id = vocabulary.end_ids[0]
        self.bos_token_id = None
        self._bytes = {text[0]: i for i, text in enumerate(tokens) if len(text) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        """Some tokens of a text; how the model would write it does not matter, because grammars force no tokens."""
        data = text.encode() if isinstance(text, str) else text
        return [self._bytes[byte] for byte in data if byte in self._bytes]


class Grammars:
    """Compiles for the core in a thread. `fileno` is readable when `take` has something."""

    def __init__(self, load: Callable[[], Compiler]) -> None:
        """`load` is called with the first grammar, in the thread."""
        self._load = load
        self._compiler: Compiler | None = None
        self._kept: OrderedDict[str, GrammarState] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._done: SimpleQueue[tuple[int, GrammarState | GrammarError]] = SimpleQueue()
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._wake, False)

    def fileno(self) -> int:
        return self._wake

    def ask(self, request_id: int, text: str) -> None:
        """Have `text` compiled for a request."""
        self._thread.submit(self._compile, request_id, text)

    def take(self) -> list[tuple[int, GrammarState | GrammarError]]:
        """What has been compiled since the last call, or why it could not be."""
        try:
            os.read(self._wake, 1 << 16)
        except BlockingIOError:
            return []
        done = []
        while True:
            try:
                done.append(self._done.get_nowait())
            except Empty:
                return done

    def close(self) -> None:
        """End the thread, after what it is compiling."""
        self._thread.shutdown(cancel_futures=True)
        os.close(self._wake)
        os.close(self._woken)

    def _compile(self, request_id: int, text: str) -> None:
        try:
            result: GrammarState | GrammarError = self._state(text)
        except GrammarError as error:
            result = error
        except BaseException as error:  # a panic of the library is one; it must not leave the request waiting
            result = GrammarError(f"the compiler failed: {type(error).__name__}: {error}")
        self._done.put((request_id, result))
        os.write(self._woken, b"\0")

    def _state(self, text: str) -> GrammarState:
        if self._compiler is None:
            self._compiler = self._load()
        state = self._kept.pop(text, None) or self._compiler.compile(text)
        self._kept[text] = state
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return state.copy()


def _first(mask: bytes) -> int:
    """The lowest token of a mask, which has one."""
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1


def _reason(message: str) -> str:
    """The compiler's message without the place in a text that the client has not written, and without that text."""
    lines = []
    for line in message.splitlines():
        if re.match(r"\s*\d+ \| ", line):
            break
        lines.append(line.rstrip())
    reason = re.sub(r"^at \d+\(\d+\): |^\d+\(\d+\): ", "", "\n".join(lines).strip())
    return reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON] + "…"
