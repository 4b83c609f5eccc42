"""`tierline policy history`, `show` and `diff`: what was in force when, as it was written."""

from __future__ import annotations

import difflib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from gateway.cli.common import (
    Column,
    ConfigOption,
    Exit,
    JsonOption,
    closest,
    fail,
    print_json,
    print_table,
    settings_or_exit,
    with_database,
)

if TYPE_CHECKING:
    from gateway.ledger.policy_versions import PolicyVersion
    from gateway.settings import Settings

_HELP = "NAME: as in the policy folder now; NAME@VERSION: one that was in force; or a file."


def history(
    name: Annotated[str | None, typer.Argument(help="Policy. Default: all.")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Every version that a gateway of this installation had in force, the latest first. Times are UTC.

    First and last seen are no span: others may have been in force in between.

    Exit code 1: none is known.
    """
    from gateway.ledger.policy_versions import history as read

    found = with_database(settings_or_exit(config), lambda database: read(database, name))
    if not found:
        fail(f"no version of {f'policy {name!r}' if name else 'any policy'} is on record")
    if as_json:
        print_json([{**msgspec.structs.asdict(one), "text": None} for one in found])
        return
    columns = ["policy", "version", "file", "first seen", "last seen", "seen by"]
    print_table(
        [Column(title, "value") for title in columns],
        [
            [one.name, one.version, one.file, _moment(one.first_seen_ms), _moment(one.last_seen_ms), one.seen_by]
            for one in found
        ],
    )


def show(
    what: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help=_HELP)],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """The text of a policy, as it is in the folder now or as it once was in force.

    Exit code 2: there is none.
    """
    name, text = _text(settings_or_exit(config), what)
    if as_json:
        print_json({"policy": name, "text": text})
    else:
        print(text, end="")


def diff(
    old: Annotated[str, typer.Argument(metavar="NAME[@VERSION]|FILE", help=_HELP)],
    new: Annotated[
        str | None, typer.Argument(metavar="NAME[@VERSION]|FILE", help=f"Default: the same policy now. {_HELP}")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """How two texts of a policy differ, line by line.

    Exit code 0: they do not; 1: they do; 2: one of them is not there.
    """
    settings = settings_or_exit(config)
    before = _text(settings, old)
    after = _text(settings, new or old.partition("@")[0])
    lines = [text.splitlines(keepends=True) for _, text in (before, after)]
    found = list(difflib.unified_diff(lines[0], lines[1], before[0], after[0]))
    if as_json:
        print_json({"old": before[0], "new": after[0], "lines": [line.rstrip("\n") for line in found]})
    else:
        print("".join(line if line.endswith("\n") else f"{line}\n" for line in found), end="")
    if found:
        raise typer.Exit(Exit.FAILED)


def _text(settings: Settings, what: str) -> tuple[str, str]:
    """What to call it, and its text; or exit code 2."""
    from gateway.ledger.policy_versions import UnknownVersion, find
    from policies import yamlfile
    from policies.yamlfile import InvalidFile

    name, separator, version = what.partition("@")
    try:
        if Path(what).suffix in (".yaml", ".yml") or Path(what).is_file():
            return what, yamlfile.read(Path(what))
        if not separator:
            return _now(settings, name)
    except InvalidFile as error:
        fail(str(error), Exit.USAGE)
    found: PolicyVersion = with_database(
        settings, lambda database: find(database, name, version), usage=(UnknownVersion,)
    )
    return f"{found.name}@{found.version}", found.text


def _now(settings: Settings, name: str) -> tuple[str, str]:
    """The policy of the folder, which need not be right: by its name, as far as it can be read."""
    from policies import yamlfile
    from policies.load import files_in, not_a_file

    known = {}
    for path in files_in(settings.policies_dir):
        if not_a_file(path) is not None:
            continue
        text = yamlfile.read(path)
        try:
            data = yamlfile.parse(text, str(path)).data
        except yamlfile.InvalidFile:
            continue
        if isinstance(data, dict):
            known[str(data.get("name"))] = (path, text)
    if name not in known:
        names = ", ".join(known)
        fail(
            f"there is no policy '{name}' in {settings.policies_dir}.{closest(name, known)} Policies: {names}.",
            Exit.USAGE,
        )
    path, text = known[name]
    return f"{name} ({path.name})", text


def _moment(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"
