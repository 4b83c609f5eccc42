"""`tierline tiers forget`: take back what `tier: auto` learnt from answers, and should not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.common import ConfigOption, Exit, JsonOption, fail, print_json, settings_or_exit, with_database

if TYPE_CHECKING:
    from gateway.ledger.database import Database
    from gateway.outcomes.forgetting import Forgotten


def forget(
    task: Annotated[str | None, typer.Option(metavar="TASK", help="Only of a task, or one kind of request.")] = None,
    policy: Annotated[str | None, typer.Option(metavar="NAME", help="Only of this policy's requests.")] = None,
    team: Annotated[str | None, typer.Option(metavar="TEAM", help="Only of a team: ORGANISATION/NAME or id.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="WHEN", help="Only since: 2026-11-30, or ago: 7d. Whole days, UTC.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All outcomes; needed when no condition is given.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget ratings, audits and faults that meet every condition given. Gateways follow within seconds.

    The audit log says who forgot what. What keys have used of their share of the day stays used.

    Exit code 1: the database cannot be used; 2: no condition and no --all, or one that names nobody or nothing.
    """
    from gateway.access.levels import InvalidLevel, find_level
    from gateway.ledger.reports import InvalidReport, parse_span
    from gateway.outcomes.forgetting import forget
    from gateway.outcomes.store import DAY_MS

    if everything == any(given is not None for given in (task, policy, team, since)):
        fail("say which outcomes: --task, --policy, --team, --since, or --all alone for every one.", Exit.USAGE)
    kinds = None if task is None else _kinds(task)

    async def run(database: Database) -> Forgotten:
        begins, _ = parse_span(since, None)
        whose = None if team is None else (await find_level(database, f"team:{team}")).id
        day = None if begins is None else int(begins.timestamp() * 1000) // DAY_MS
        return await forget(database, kinds=kinds, policy=policy, team=whose, since_day=day)

    found = with_database(settings_or_exit(config), run, usage=(InvalidReport, InvalidLevel))
    if as_json:
        print_json({"good": found.wins, "bad": found.losses})
    else:
        print(f"forgotten: {found.wins:g} good, {found.losses:g} bad")


def _kinds(task: str) -> list[str]:
    """The kinds of a task, or the one of this name."""
    from tiers.task import KINDS

    kinds = [kind for kind, of in KINDS.items() if task in (kind, of)]
    if not kinds:
        known = ", ".join(sorted({*KINDS.values()}))
        fail(f"--task: there is no task or kind '{task}'; tasks are {known}", Exit.USAGE)
    return kinds
