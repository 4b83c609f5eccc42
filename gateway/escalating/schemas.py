"""Whether a JSON value fits a schema that a client wrote: checked off the event loop, within bounds.

A schema is code from outside: references that fan out, and patterns on which a backtracking engine never ends. So every
keyword that is looked at costs a step and a check has so many of them; patterns run in an engine whose time grows with
the text only; and nothing is fetched from anywhere. What cannot be checked within that (or is no valid schema) is not
checked: the answer is then taken as it is, never as wrong.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from policies import cel, patterns

logger = logging.getLogger("tierline.escalating")

MOST_SCHEMA_BYTES: Final = 64 * 1024
MOST_KEPT: Final = 256  # compiled schemas
MOST_STEPS: Final = 6_000  # about a tenth of a second
_REFERENCE: Final = 3  # steps that following one takes
_PER_STEP: Final = 150.0  # of the steps of a pattern (0.1 µs each), in one of ours

Keyword = Callable[[Any, Any, Any, Any], Any]


class _Unchecked(Exception):
    """It cannot be said whether the value fits."""


class Schemas:
    """Compiled schemas, the latest of them. `close` it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "schemas")
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        self._classes: dict[type[Any], type[Any]] = {}
        self._left = 0.0

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def fits(self, schema: dict[str, Any], value: Any) -> bool | None:
        """Whether the value fits; None where that cannot be said."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._fits, schema, value)

    def _fits(self, schema: dict[str, Any], value: Any) -> bool | None:
        try:
            validator = self._compiled(schema)
            self._left = float(MOST_STEPS)
            return next(iter(validator.iter_errors(value)), None) is None
        except Exception as error:  # whatever a strange schema makes the library do
            logger.info("an answer was not checked against its schema: %s", type(error).__name__)
            return None

    def _compiled(self, schema: dict[str, Any]) -> Any:
        encoded = msgspec.json.encode(schema)
        if len(encoded) > MOST_SCHEMA_BYTES or b'"patternProperties"' in encoded:
            raise _Unchecked
        digest = hashlib.sha256(encoded).digest()
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return self._kept[digest]
        from jsonschema.validators import Draft202012Validator, validator_for
        from referencing import Registry

        # Whether the schema itself is a valid one is the backend's affair, and costs more than to use it.
        kind = validator_for(schema, default=Draft202012Validator)
        validator = self._kept[digest] = self._class(kind)(schema, registry=Registry())  # one that fetches nothing
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return validator

    def _class(self, kind: type[Any]) -> type[Any]:
        """The library's validator of a draft, with every keyword counted."""
        if kind not in self._classes:
            from jsonschema.validators import extend

            keywords: dict[str, Keyword] = {
                name: self._counted(name, keyword) for name, keyword in kind.VALIDATORS.items()
            }
            keywords |= {"pattern": self._pattern, "uniqueItems": self._unique(kind)}
            self._classes[kind] = extend(kind, keywords)  # type: ignore[no-untyped-call]
        return self._classes[kind]

    def _counted(self, name: str, keyword: Keyword) -> Keyword:
        steps = _REFERENCE if name.endswith("ef") else 1  # $ref, $dynamicRef

        def counted(validator: Any, said: Any, instance: Any, schema: Any) -> Any:
            self._spend(steps)
            return keyword(validator, said, instance, schema)

        return counted

    def _pattern(self, validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
        if not isinstance(instance, str):
            return
        size = patterns.size(pattern)
        self._spend(1 + (size.compile_steps + size.search_steps(len(instance))) / _PER_STEP)
        try:
            found = cel.evaluate("text.matches(pattern)", {"text": instance, "pattern": pattern})
        except (RuntimeError, ValueError) as error:  # such as look-ahead, which that engine does not have
            raise _Unchecked from error
        if not found:
            from jsonschema.exceptions import ValidationError

            yield ValidationError("does not match the pattern")

    def _unique(self, kind: type[Any]) -> Keyword:
        keyword: Keyword = kind.VALIDATORS["uniqueItems"]

        def unique(validator: Any, said: Any, instance: Any, schema: Any) -> Any:
            self._spend(1 + (len(instance) ** 2 / 10 if isinstance(instance, list) else 0))
            return keyword(validator, said, instance, schema)

        return unique

    def _spend(self, steps: float) -> None:
        self._left -= steps
        if self._left < 0:
            raise _Unchecked
