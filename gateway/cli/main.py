"""Assembles `tierline` from its modules, loading only the one that the command line names.

`tierline --help` therefore answers at once, and a command that needs no database never loads one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer


@dataclass(frozen=True, slots=True)
class Command:
    """One top-level word: `module:attribute` is a typer app (a group) or a function (a single command)."""

    name: str
    target: str
    help: str
    panel: str
    default: str | None = None  # what a group does without a further word
    passes_arguments: bool = False  # everything after the word belongs to another program, its --help too
    private: bool = True  # files that it makes are for their owner alone


_RUN, _USE, _CHECK = "Run", "Use", "Look inside"

COMMANDS = (
    Command("up", "gateway.cli.up:up", "Start everything: engines, cache, gateway. Ctrl-C drains and stops.", _RUN),
    Command("gateway", "gateway.cli.run:gateway", "Run the gateway process alone.", _RUN, passes_arguments=True),
    Command("engine", "gateway.cli.run:engine", "Run an inference engine alone.", _RUN, passes_arguments=True),
    Command(
        "cache",
        "gateway.cli.cache:app",
        "Run the answer cache alone; stats, purge, evaluate.",
        _RUN,
        default="gateway.cli.run:cache",
    ),
    Command("models", "gateway.cli.models:app", "Pull and list models.", _USE),
    Command("keys", "gateway.cli.keys:app", "Create, list, change, rotate and revoke API keys.", _USE),
    Command("owners", "gateway.cli.owners:app", "Organisations, teams, projects: limits, budgets, usage.", _USE),
    Command("admin", "gateway.cli.admin:app", "Keys of the admin API, and the audit log.", _USE),
    Command("policy", "gateway.cli.policy:app", "Check, test, simulate and explain policies.", _USE, private=False),
    Command("batches", "gateway.cli.batches:app", "Batches of requests: list, show, cancel.", _USE),
    Command("cost", "gateway.cli.cost:app", "What was spent, by team, model, tier, day.", _USE),
    Command("tiers", "gateway.cli.tiers:app", "How good tiers are, and what they cost.", _USE),
    Command("explain", "gateway.cli.explain:explain", "Why a request went where it went.", _CHECK),
    Command("doctor", "gateway.cli.doctor:doctor", "Check this machine and the configuration.", _CHECK),
)


def build(selected: str | None = None) -> typer.Typer:
    """The whole application, with only the command `selected` loaded (None: all of them)."""
    app = typer.Typer(
        name="tierline",
        help="One endpoint for every large language model you use.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong command line or configuration.",
        no_args_is_help=True,
        pretty_exceptions_show_locals=False,  # they may hold keys and prompts
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for command in COMMANDS:
        target = _load(command.target) if selected in (None, command.name) else _not_loaded
        _add(app, command, target)
    return app


def main() -> None:
    """Entry point of the console script."""
    # The shell's completion asks for words of any command.
    word = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    if any(command.name == word and command.private for command in COMMANDS):
        # Keys, ledger, answers, logs: whatever lands in the data folder, by us, a library or a process of ours.
        os.umask(0o077)
    build(None if "_TIERLINE_COMPLETE" in os.environ else word)(prog_name="tierline")


def _add(app: typer.Typer, command: Command, target: typer.Typer | Callable[..., Any]) -> None:
    if isinstance(target, typer.Typer):
        options: dict[str, Any] = {"name": command.name, "rich_help_panel": command.panel}
        if command.default:
            options |= {"callback": _load(command.default), "invoke_without_command": True, "no_args_is_help": False}
        else:
            options["help"] = command.help
        app.add_typer(target, short_help=command.help, **options)
        return
    settings: dict[str, Any] = {}
    if command.passes_arguments:
        settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    # A loaded function's own docstring is its long help; the list shows the short one.
    help_text = command.help if target is _not_loaded else None
    app.command(
        command.name, help=help_text, short_help=command.help, rich_help_panel=command.panel, context_settings=settings
    )(target)


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _not_loaded() -> None:
    raise AssertionError("a command that was not named on the command line cannot run")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"tierline {importlib.metadata.version('tierline')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass
