"""The reference pages name every command, option and key that there is, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from pydantic import BaseModel

from gateway.cli.main import COMMANDS, build
from gateway.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
CLI = (ROOT / "docs/reference/cli.md").read_text()
PLATFORM = (ROOT / "docs/reference/tierline-yaml.md").read_text()

EVERYWHERE = {"--help", "--json", "--config"}


def options(name: str) -> Iterator[tuple[str, set[str]]]:
    """Each command under a top-level word with its long options."""

    def walk(command: Any, words: str) -> Iterator[tuple[str, set[str]]]:
        if hasattr(command, "commands"):
            for word, child in command.commands.items():
                yield from walk(child, f"{words} {word}".strip())
        else:
            said = [getattr(one, kind, []) for one in command.params for kind in ("opts", "secondary_opts")]
            names = {option for options in said for option in options}
            yield words, {option for option in names if option.startswith("--")}

    group: Any = typer.main.get_command(build(name))
    yield from walk(group.commands[name], name)


@pytest.mark.parametrize("name", [command.name for command in COMMANDS])
def test_the_cli_page_names_every_command_and_option(name: str) -> None:
    for words, names in options(name):
        assert re.search(rf"`(tierline )?{words}\b", CLI), f"'{words}' is not in docs/reference/cli.md"
        missing = {option for option in names - EVERYWHERE if option not in CLI}
        assert not missing, f"{words}: {missing}"


def test_the_cli_page_names_no_option_that_does_not_exist() -> None:
    known = {"--version", "--install-completion", "--show-completion", *EVERYWHERE}
    for command in COMMANDS:
        known |= {option for _, names in options(command.name) for option in names}
    known |= {"--host", "--port", "--worker", "--model", "--precision"}  # of the gateway's and the engine's programs
    known |= {"--timeout"}  # of `engine restart`, whose neighbours are that program's options
    written = set(re.findall(r"--[a-z][a-z-]+", CLI))
    assert written <= known, written - known


def written_commands() -> list[tuple[str, str]]:
    """Every `tierline ...` in a code span or block of the handbook, and its page."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found: list[tuple[str, str]] = []
    for page in pages:
        text = page.read_text()
        lines = re.findall(r"^(?: {4}|\$ )?tierline (.*?)(?:  #.*)?$", text, re.MULTILINE)
        found += [(page.name, line) for line in [*re.findall(r"`tierline ([^`]+)`", text), *lines]]
    return found


def test_the_handbook_writes_commands_as_they_are() -> None:
    known = {words: names for command in COMMANDS for words, names in options(command.name)}
    checked = 0
    for page, line in written_commands():
        words = [word for word in line.split()[:2] if re.fullmatch(r"[a-z]+", word)]
        command = next((name for name in (" ".join(words), *words[:1]) if name in known), None)
        if command is None:
            # A group by itself, `a|b` for several, or COMMAND for any.
            assert any(name.startswith(f"{words[0]} ") for name in known) if words else line[0] in "C-", (page, line)
            continue
        own_program = command in ("gateway", "engine")
        given = set(re.findall(r"--[a-z][a-z-]+", line))
        assert own_program or given <= known[command] | EVERYWHERE, (page, line)
        checked += 1
    assert checked > 30


def keys(model: type[BaseModel]) -> Iterator[str]:
    """Every key of the platform file, wherever it stands."""
    for name, field in model.model_fields.items():
        yield name
        for inner in models_in(field.annotation):
            yield from keys(inner)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def test_the_platform_page_names_every_key_and_no_other() -> None:
    written = {word for code in re.findall(r"`([a-zA-Z_.]+)`", PLATFORM) for word in code.split(".")}
    existing = set(keys(Settings))
    assert existing - {"version"} <= written | {"version"}, existing - written
    rows = re.findall(r"^\| ((?:`[a-z_.]+`(?:, )?)+) \|", PLATFORM, re.MULTILINE)
    documented = {word for row in rows for code in re.findall(r"`([a-z_.]+)`", row) for word in code.split(".")}
    assert documented <= existing, documented - existing


def test_the_defaults_on_the_page_are_those_of_the_code() -> None:
    server, cache = Settings().server, Settings().cache
    for name, value in (
        ("port", server.port),
        ("max_body_bytes", server.max_body_bytes),
        ("drain_seconds", f"{server.drain_seconds:g}"),
        ("similarity_threshold", cache.similarity_threshold),
        ("ttl_seconds", f"{cache.ttl_seconds:g}"),
        ("lookup_timeout_ms", f"{cache.lookup_timeout_ms:g}"),
    ):
        assert f"| `{name}` | {value} |" in PLATFORM, name
