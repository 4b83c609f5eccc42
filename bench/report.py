"""How every benchmark reports: one list of rows, printed as a table and written as JSON.

A benchmark measures, makes `Row`s and calls `report(name, rows)`; the table goes to standard output and the rows to
`bench/results/NAME.json`. One form for all lets documents, tests and comparisons read any result the same way.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: what was measured (`metric`, `unit`), of what (`system`), under which circumstances (`setting`).

    `median`, `min` and `max` are over `runs` runs; a quantity that does not vary (a compiled kernel's registers) has
    one run and three equal numbers.
    """

    metric: str  # "requests_per_second"
    system: str  # "tierline", or the peer's name
    setting: str  # "connections=64"
    unit: str  # "1/s"
    median: float
    min: float
    max: float
    runs: int

    @classmethod
    def of(cls, metric: str, system: str, setting: str, unit: str, values: Sequence[float]) -> Row:
        """The row that sums up `values`, one per run. Raises ValueError when there is none."""
        if not values:
            raise ValueError(f"no run of {metric} for {system} ({setting}): nothing to report")
        return cls(metric, system, setting, unit, statistics.median(values), min(values), max(values), len(values))


def report(name: str, rows: Iterable[Row], directory: Path = RESULTS, *, show: bool = True) -> Path:
    """Print `rows` as a table and write them to `directory/name.json`; returns that path.

    `show` False: no table, for a benchmark with many rows that prints a denser one of its own.
    Raises ValueError for a name that is not lower-case letters, digits, `-` and `_`, or when there is no row.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise ValueError(f"report name {name!r}: use lower-case letters, digits, '-' and '_'")
    rows = list(rows)
    if not rows:
        raise ValueError(f"report {name!r} has no rows: the benchmark measured nothing")
    if show:
        _print(name, rows)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    lines = ",\n".join(json.dumps(asdict(row), ensure_ascii=False) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return path


def _print(name: str, rows: Sequence[Row]) -> None:
    table = Table(title=name)
    for column in ("metric", "system", "setting", "unit"):
        table.add_column(column, overflow="fold")
    for column in ("median", "min", "max", "runs"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = (
            f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}" for value in (row.median, row.min, row.max)
        )
        table.add_row(row.metric, row.system, row.setting, row.unit, *numbers, str(row.runs))
    console = Console()
    if not console.is_terminal:  # a log or a pipe: eighty columns would fold every cell
        console.width = 160
    console.print(table)
