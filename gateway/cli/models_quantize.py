"""`tierline models quantize`: four-bit weights of a model in floats. `engine.quantize` does the work, as a process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.common import Column, JsonOption, print_json, print_table
from gateway.cli.engine_process import ask_engine


def quantize(
    folder: Annotated[Path, typer.Argument(help="A model folder with safetensors in floats.", metavar="DIR")],
    out: Annotated[Path, typer.Option("--out", help="The new folder. It must not exist.", metavar="DIR")],
    method: Annotated[str, typer.Option("--method", help="awq or gptq.", metavar="METHOD")] = "awq",
    bits: Annotated[int, typer.Option("--bits", help="Bits per weight: 4.", metavar="N")] = 4,
    group_size: Annotated[
        int, typer.Option("--group-size", help="Columns that share a scale: a multiple of 32.", metavar="N")
    ] = 128,
    calibration: Annotated[
        Path | None, typer.Option("--calibration", help="A text like those to come. Default: a bundled one.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", help="Rows of tokens to calibrate on.", metavar="N")] = 64,
    length: Annotated[int, typer.Option("--length", help="Tokens of a row.", metavar="N")] = 512,
    as_json: JsonOption = False,
) -> None:
    """Make a model's matrices four bits wide, by AWQ or GPTQ, and measure what it costs.

    An eighth of the calibration text is held out: its perplexity before and after is printed. The new folder has the
    formats' own layout, so other engines read it, too. Works on CPUs, a block of the model at a time, for dense models
    of the Llama, Mistral and Qwen families.

    Example: `tierline models quantize ./Qwen3-0.6B --method gptq --out ./Qwen3-0.6B-gptq`.
    """
    arguments = [str(folder), "--out", str(out), "--method", method, "--bits", str(bits)]
    arguments += ["--group-size", str(group_size), "--samples", str(samples), "--length", str(length)]
    arguments += ["--calibration", str(calibration)] if calibration else []
    outcome = ask_engine("engine.quantize", arguments)
    if as_json:
        print_json(outcome)
        return
    before, after = outcome["perplexity_before"], outcome["perplexity_after"]
    print(f"{outcome['out']}: {outcome['method']}, 4 bits, groups of {outcome['group_size']}")
    print_table(
        [Column(""), Column("before", "number"), Column("after", "number"), Column("", "number")],
        [
            ("perplexity, held out", f"{before:.3f}", f"{after:.3f}", f"{after / before - 1:+.2%}"),
            (
                "weights",
                f"{outcome['bytes_before'] / 1e6:,.1f} MB",
                f"{outcome['bytes_after'] / 1e6:,.1f} MB",
                f"{outcome['bytes_after'] / outcome['bytes_before'] - 1:+.0%}",
            ),
        ],
    )
