"""What all commands share: exit codes, how an error is said, how the configuration is found.

Results go to standard output, everything else to standard error, so that output can be piped.
"""

from __future__ import annotations

import json
import sys
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from gateway.settings import Settings, load
from policies.yamlfile import InvalidFile


class Exit(IntEnum):
    """Exit codes of every command."""

    OK = 0
    FAILED = 1  # it was tried and did not work; standard error says why
    USAGE = 2  # wrong command line, or a configuration file that cannot be used


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="The platform file. Default: $TIERLINE_CONFIG, else tierline.yaml.", metavar="FILE"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def fail(message: str, code: Exit = Exit.FAILED) -> NoReturn:
    """Say what is wrong on standard error and end the command."""
    print(f"tierline: {message}", file=sys.stderr)
    raise typer.Exit(code)


def settings_or_exit(config: Path | None) -> Settings:
    """The settings, or every fault of the file with its line and exit code 2."""
    try:
        return load(config)
    except InvalidFile as error:
        lines = "\n".join(str(problem) for problem in error.problems)
        hint = "" if config_path(config).exists() else "\nName the file with --config FILE or TIERLINE_CONFIG."
        fail(f"the configuration cannot be used:\n{lines}{hint}", Exit.USAGE)


def config_path(config: Path | None) -> Path:
    """The file that `load` reads, absolute."""
    import os

    return (config or Path(os.environ.get("TIERLINE_CONFIG", "tierline.yaml"))).resolve()


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))
