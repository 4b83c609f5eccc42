"""How far the loading of a model is: a bar on a terminal, else a log line every few seconds.

`reported` wraps the weights' source: it counts the blocks as the decoder takes them, so neither need know of it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from engine.models.tensors import FloatArray, LayerTensors, TensorSource
from engine.quant.matrix import WeightMatrix

logger = logging.getLogger(__name__)

# A model that loads faster than this needs no lines.
SECONDS_BETWEEN_LINES = 5.0

# Called with the blocks done and all of them.
Report = Callable[[int, int], None]


class Reported:
    """`source`, whose blocks are counted as they are taken: block n is done when block n + 1 is asked for."""

    def __init__(self, source: TensorSource, report: Report) -> None:
        self.spec = source.spec
        self._source, self._report = source, report

    def embedding(self) -> WeightMatrix:
        return self._source.embedding()

    def layers(self) -> Iterator[LayerTensors]:
        total = self.spec.num_layers
        self._report(0, total)
        for done, layer in enumerate(self._source.layers(), 1):
            yield layer
            self._report(done, total)

    def final_norm(self) -> FloatArray:
        return self._source.final_norm()

    def output(self) -> WeightMatrix:
        return self._source.output()


@contextmanager
def reported(source: TensorSource, name: str, stream: TextIO | None = None) -> Iterator[TensorSource]:
    """`source` with its progress on `stream` (None: standard error) while the context lasts."""
    stream = sys.stderr if stream is None else stream
    with bar(f"loading {name}", stream) if stream.isatty() else _lines(name) as report:
        yield Reported(source, report)


@contextmanager
def bar(what: str, stream: TextIO) -> Iterator[Report]:
    """A bar on `stream`, a terminal, that is gone in the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("blocks"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=stream), transient=True) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


@contextmanager
def _lines(name: str, now: Callable[[], float] = time.monotonic) -> Iterator[Report]:
    last = now()

    def report(done: int, total: int) -> None:
        nonlocal last
        if now() - last >= SECONDS_BETWEEN_LINES:
            last = now()
            logger.info("loading %s: %d of %d blocks", name, done, total)

    yield report
