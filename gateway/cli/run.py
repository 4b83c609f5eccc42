"""`tierline gateway`, `tierline engine`, `tierline cache`: each process alone, as its own program.

Arguments are handed on as they are; this process becomes that program, so signals and exit codes are its own. The
engine and the cache are named by module and never imported here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from gateway.cli.common import ConfigOption, fail, settings_or_exit
from gateway.processes import CannotStart, cache_spec


def gateway(context: typer.Context) -> None:
    """Run the gateway process alone. Options: `tierline gateway --help`."""
    _become("gateway", context.args)


def engine(context: typer.Context) -> None:
    """Run an inference engine alone. Options: `tierline engine --help`.

    `tierline engine restart`: engines that `tierline up` has started, one after the other.
    """
    if context.args[:1] == ["restart"]:
        from gateway.cli.restart import app

        app(context.args[1:], prog_name="tierline engine restart")
    _become("engine", context.args)


def cache(context: typer.Context, config: ConfigOption = None) -> None:
    """Run the answer cache alone, with the settings of tierline.yaml, until SIGTERM or Ctrl-C.

    With a command: ask the running cache (stats, purge) or measure one on your data (evaluate).
    """
    if context.invoked_subcommand is not None:
        return
    try:
        spec = cache_spec(settings_or_exit(config))
    except CannotStart as error:
        fail(str(error))
    os.environ.update(spec.env)
    os.execv(spec.argv[0], spec.argv)


def _become(module: str, arguments: Sequence[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
