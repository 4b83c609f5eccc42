"""`python -m engine.quantize FOLDER --method awq --out FOLDER`: prints the outcome as JSON, progress on standard error.

Exit code 2: what is asked for cannot be done.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from engine import threads
from engine.loader.errors import ModelFileError
from engine.loader.progress import Report, bar


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="tierline models quantize", description=__doc__)
    parser.add_argument("folder", type=Path, help="a model folder with safetensors in floats")
    parser.add_argument("--out", type=Path, required=True, help="where the new folder goes; must not exist")
    parser.add_argument("--method", choices=("awq", "gptq"), required=True)
    parser.add_argument("--bits", type=int, choices=(4,), default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--calibration", type=Path, help="a text file; default: a bundled text")
    parser.add_argument("--samples", type=int, default=64, help="rows of tokens to calibrate on")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    given = parser.parse_args(arguments)
    try:
        print(json.dumps(quantize(given)))
    except (ModelFileError, ValueError, OSError) as error:
        print(f"tierline: {error}", file=sys.stderr)
        sys.exit(2)


def quantize(given: argparse.Namespace) -> dict[str, object]:
    """Does what the parsed command line says; see `main`. The new folder appears only when it is complete."""
    if given.out.exists():
        raise ValueError(f"{given.out} exists already: give another --out, or remove it")
    if given.samples < 1 or given.length < 32:
        raise ValueError("--samples must be at least 1 and --length at least 32")
    from engine.loader.source import open_model
    from engine.quantize.texts import bundled_text, token_rows
    from engine.text.tokenizer import Tokenizer

    model = open_model(given.folder)
    text = given.calibration.read_text(encoding="utf-8") if given.calibration else bundled_text()
    length = min(given.length, model.spec.max_position)
    calibration, held_out = token_rows(text, Tokenizer(model.info), length, given.samples)
    threads.configure(None)
    import torch  # takes seconds: what has been wrong until here is said at once

    from engine.quantize.model import quantize_folder

    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.out.parent, prefix=f".{given.out.name}-") as unfinished:
        work = Path(unfinished) / "model"
        with _progress() as report:
            outcome = quantize_folder(
                given.folder,
                work,
                model.tensors(),
                method=given.method,
                group_size=given.group_size,
                calibration=torch.tensor(calibration),
                held_out=torch.tensor(held_out),
                report=report,
            )
        work.rename(given.out)
    measured = {"calibration_tokens": length * len(calibration), "held_out_tokens": length * len(held_out)}
    return {"out": str(given.out), "method": given.method, "group_size": given.group_size} | measured | asdict(outcome)


@contextmanager
def _progress() -> Iterator[Report]:
    if sys.stderr.isatty():
        with bar("quantising", sys.stderr) as report:
            yield report
    else:
        yield lambda done, total: print(f"quantising: {done} of {total} blocks", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
