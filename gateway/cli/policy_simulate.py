"""`tierline policy simulate`: what a change would have done to recorded traffic, before anybody makes it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gateway.cli.common import ConfigOption, Exit, JsonOption, fail, print_json, settings_or_exit, short, with_database

if TYPE_CHECKING:
    from gateway.ledger.database import Database
    from gateway.settings import Settings
    from policies.load import PolicySet
    from policies.simulation.report import Report
    from policies.simulation.thresholds import Threshold

EXCEEDED: Final = 3  # exit code: a threshold of --fail-if is exceeded


def simulate(
    new: Annotated[
        Path, typer.Argument(metavar="NEW", help="A policy file, to stand in for the one of its name; or a folder.")
    ],
    since: Annotated[str, typer.Option(metavar="WHEN", help="From: 2026-11-30, or ago: 7d, 24h.")] = "7d",
    until: Annotated[str | None, typer.Option(metavar="WHEN", help="Until, exclusive. Days are UTC.")] = None,
    policies: Annotated[
        Path | None, typer.Option("--policies", help="Compare with these. Default: policies_dir of the configuration.")
    ] = None,
    fail_if: Annotated[
        list[str] | None, typer.Option("--fail-if", metavar="WHAT", help="Such as 'cost>+10%'; may be repeated.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replay recorded requests under the policies in force and under new ones, and show the difference.

    Exit code 0: done, and no threshold is exceeded; 1: the policies have errors, or nothing is on record; 2: wrong
    command line; 3: a threshold is exceeded.
    """
    from gateway.cli.policy_difference import as_text
    from gateway.ledger.reports import InvalidReport, parse_span
    from gateway.simulating.run import simulate as run
    from policies.simulation.thresholds import InvalidThreshold, parse

    settings = settings_or_exit(config)
    try:
        thresholds = [parse(text) for text in fail_if or ()]
        begins, ends = parse_span(since, until)
    except (InvalidThreshold, InvalidReport) as error:
        fail(str(error), Exit.USAGE)
    assert begins is not None
    old_set, new_set = _sets(settings, policies or Path(short(settings.policies_dir)), new)

    async def work(database: Database) -> tuple[Report, int]:
        return await run(settings, database, old_set, new_set, begins, ends)

    found, unusable = with_database(settings, work)
    if not found.requests:
        records = f"; {unusable:,} records are of an earlier version, which did not hold enough" if unusable else ""
        fail(f"no request is on record since {begins:%Y-%m-%d %H:%M} UTC{records}")
    exceeded = [threshold for threshold in thresholds if _exceeded(threshold, found)]
    if as_json:
        print_json(
            {
                **found.as_json(),
                "unusable": unusable,
                "thresholds": [
                    {"threshold": one.text, "value": found.value(one.metric, one.percent), "exceeded": one in exceeded}
                    for one in thresholds
                ],
            }
        )
    else:
        print(as_text(found, unusable))
        for one in thresholds:
            value = found.value(one.metric, one.percent)
            said = "unknown" if value is None else f"{value:+.1%}" if one.percent else f"{value:+g}"
            print(f"{'exceeded' if one in exceeded else 'kept':<9} {one.text}: {said}")
    if exceeded:
        raise typer.Exit(EXCEEDED)


def _exceeded(threshold: Threshold, found: Report) -> bool:
    """What is not known is no excess: the report says that it is not known."""
    value = found.value(threshold.metric, threshold.percent)
    return value is not None and threshold.exceeded(value)


def _sets(settings: Settings, folder: Path, new: Path) -> tuple[PolicySet, PolicySet]:
    """The policies in force and the new ones; or exit code 1 or 2."""
    from policies.load import files_in, load, load_file, load_files
    from policies.yamlfile import InvalidFile

    known = (settings.tiers_served(), list(settings.models))
    if not new.exists():
        fail(f"{new} does not exist", Exit.USAGE)
    try:
        before = load(folder, *known)
    except InvalidFile as error:
        fail(f"the policies in force have errors:\n{error}")
    if new.resolve() in (folder.resolve(), *(path.resolve() for path in files_in(folder))):
        text = "is what it would be compared with, and in force already: edit a copy elsewhere, or name --policies"
        fail(f"{new} {text}", Exit.USAGE)
    try:
        if new.is_dir():
            return before, load(new, *known)
        policy = load_file(new, *known)[0]
        begins = policy.document.valid_from  # one that begins later stands beside the one of now, and is simulated then
        same = (policy.name, begins)
        replaced = {other.file for other in before.written if (other.name, other.document.valid_from) == same}
        after = load_files([*(path for path in files_in(folder) if str(path) not in replaced), new], *known)
        return before, after if begins is None else after.at(max(begins, datetime.now(UTC)))
    except InvalidFile as error:
        fail(f"the new policies have errors:\n{error}")
