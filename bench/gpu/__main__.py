"""`make gpu-check`: one command that says whether the engine is right on this GPU, and how near to what it allows.

    python -m bench.gpu [--only PART ...] [--minutes 8]
    python -m bench.gpu --dry-run          on a CPU: everything tiny, kernels interpreted, figures without meaning

Each part is a process of its own with a time limit: what fails, hangs or crashes costs its own figures and no others.
The table stands achieved figures beside the roofline (this card's measured copy and matrix rates), and transformers'
`generate` beside both. `gpu.json` in `bench/results` has it all; the exit code is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bench.report import report

if TYPE_CHECKING:
    import torch

    from bench.gpu.card import Card
    from bench.gpu.figures import Figure

_ROOT = Path(__file__).resolve().parents[2]
# What each part may take, in seconds, in the order of running: what is right first, what takes longest last.
PARTS = {
    "card": 40,
    "recorded": 60,
    "compiled": 60,
    "parity": 150,
    "attention": 60,
    "llama-3.1-8b": 120,
    "llama-3.1-8b-awq": 60,
    "llama-3.1-8b-fp8": 60,
    "qwen3-8b": 60,
    "transformers": 60,
    "qwen3-30b-a3b": 80,
    "llama-70b-fp8": 100,
}
_LEAST_SECONDS = 10  # with less left, a part is not begun
_REHEARSAL = 4  # on a CPU, with kernels interpreted, parts may take so many times as long


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one part ended. `problem`: None where it went well."""

    part: str
    seconds: float
    figures: list[Figure]
    problem: str | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print the tables, write the results. Returns 0, or 1 if a part failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part alone; repeatable")
    parser.add_argument("--minutes", type=float, default=7.8, help="for all parts together (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="rehearse on a CPU, everything tiny")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)  # in the process of one part
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help="where gpu.json goes (default: bench/results)")
    options = parser.parse_args(arguments)
    if options.part is not None:
        _run_here(options.part, options.folder, dry=options.dry_run)
        return 0
    if not options.dry_run and not _has_gpu():
        print("no CUDA device here: `--dry-run` rehearses the check on a CPU", file=sys.stderr)
        return 2
    parts = [part for part in PARTS if options.only is None or part in options.only or part == "card"]
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        outcomes = [_run_apart(part, Path(folder), deadline, dry=options.dry_run) for part in parts]
    _show(outcomes)
    rows = [row for outcome in outcomes for figure in outcome.figures for row in figure.rows()]
    if rows and (options.results is not None or not options.dry_run):
        where = {} if options.results is None else {"directory": options.results}
        report("gpu", rows, show=False, **where)
    return int(any(outcome.problem is not None for outcome in outcomes))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


# --- one part, in its own process --------------------------------------------------------------------------------


def _run_here(part: str, folder: Path, *, dry: bool) -> None:
    """Run the part and leave its figures in `folder`."""
    import torch

    device = torch.device("cpu" if dry else "cuda")
    with torch.inference_mode():
        figures = _work_of(part, folder)(device, dry=dry)
    (folder / f"{part}.json").write_text(json.dumps([asdict(figure) for figure in figures]))


def _work_of(part: str, folder: Path) -> Callable[..., list[Figure]]:
    from bench.gpu import checks, kernels, models, parity
    from bench.gpu.card import Card

    simple: dict[str, Callable[..., list[Figure]]] = {
        "card": partial(_measure_card, folder),
        "recorded": checks.recorded,
        "compiled": checks.compiled,
        "parity": parity.parity,
        "transformers": models.transformers_generate,
    }
    if part in simple:
        return simple[part]
    card: Card = Card.load(folder)
    if part == "attention":
        return partial(kernels.attention, card=card)
    return partial(models.model, part, card=card)


def _measure_card(folder: Path, device: torch.device, *, dry: bool) -> list[Figure]:
    from bench.gpu import card

    measured = card.measure(device, dry=dry)
    measured.save(folder)
    print(f"{measured.name}, {measured.versions}")
    return measured.figures()


# --- all parts, from outside -------------------------------------------------------------------------------------


def _run_apart(part: str, folder: Path, deadline: float, *, dry: bool) -> Outcome:
    from bench.gpu.figures import Figure

    start = time.monotonic()
    limit = min(PARTS[part] * (_REHEARSAL if dry else 1), deadline - start)
    if limit < _LEAST_SECONDS:
        return _told(Outcome(part, 0.0, [], "not begun: the time for all parts was over"))
    command = [sys.executable, "-m", "bench.gpu", "--part", part, "--folder", str(folder)]
    env = os.environ | {"TRITON_INTERPRET": "1" if dry else "0"}
    try:
        run = subprocess.run(
            [*command, *(["--dry-run"] if dry else [])],
            cwd=_ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _told(Outcome(part, limit, [], f"not done within its {limit:.0f} s"))
    took = time.monotonic() - start
    if run.returncode:
        return _told(Outcome(part, took, [], f"ended with {run.returncode}: {run.stdout[-1500:]}{run.stderr[-3000:]}"))
    figures = [Figure(**entry) for entry in json.loads((folder / f"{part}.json").read_text())]
    if run.stdout.strip():
        print(run.stdout.strip())
    return _told(Outcome(part, took, figures, None))


def _told(outcome: Outcome) -> Outcome:
    """Say it at once: whoever runs this may be cut off before the end."""
    print(f"{outcome.part:18} {outcome.seconds:6.1f} s  {outcome.problem or 'ok'}", flush=True)
    for figure in outcome.figures:
        share = "" if figure.share is None else f"  {100 * figure.share:.1f} % of {figure.bound:,.4g}"
        print(f"    {figure.what} {figure.setting}: {figure.achieved:,.4g} {figure.unit}{share}", flush=True)
    return outcome


def _show(outcomes: Sequence[Outcome]) -> None:
    """The table. A goal of a time or a waste is to be stayed below."""
    peers = {
        (figure.what, figure.setting): figure.achieved
        for outcome in outcomes
        for figure in outcome.figures
        if figure.system == "transformers"
    }
    table = Table(title="gpu-check")
    for column in ("what", "setting", "unit"):
        table.add_column(column, overflow="fold")
    for column in ("achieved", "roofline", "share", "goal", "transformers"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        for figure in outcome.figures:
            if figure.system == "transformers":
                continue
            numbers = (figure.achieved, figure.bound, None, figure.goal, peers.get((figure.what, figure.setting)))
            cells = ["" if number is None else f"{number:,.4g}" for number in numbers]
            cells[2] = "" if figure.share is None else f"{100 * figure.share:.1f} %"
            table.add_row(figure.what, figure.setting, figure.unit, *cells)
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(table)
    for outcome in outcomes:
        if outcome.problem is not None:
            print(f"FAILED {outcome.part}: {outcome.problem.splitlines()[-1]}")


if __name__ == "__main__":
    sys.exit(main())
