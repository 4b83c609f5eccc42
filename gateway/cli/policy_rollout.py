"""`tierline policy rollout`: how policies that are tried stand, and letting one begin again that was taken back."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from gateway.cli.common import (
    ConfigOption,
    Exit,
    JsonOption,
    closest,
    fail,
    print_json,
    settings_or_exit,
    with_database,
)

if TYPE_CHECKING:
    from gateway.ledger.database import Database
    from gateway.rollouts.report import Rollout, ShadowSum
    from policies.load import PolicySet


def rollout(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The policy that is tried. Default: all.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Begin again, at the first step, after a roll-back.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """How far a policy that is tried has come, what its guard measures, and what a shadow would have done.

    Exit code 1: there is no such rollout, or nothing to resume; 2: the policies have errors.
    """
    from gateway.rollouts.report import report
    from policies.load import load
    from policies.yamlfile import InvalidFile

    settings = settings_or_exit(config)
    try:
        policies = load(settings.policies_dir, settings.tiers_served(), list(settings.models))
    except InvalidFile as error:
        fail(f"the policies have errors:\n{error}", Exit.USAGE)
    names = [policy.name for policy in policies.written if policy.document.rollout is not None]
    if name is not None and name not in names:
        fail(f"no policy '{name}' is being rolled out.{closest(name, names)}")
    if resume:
        if name is None:
            fail("--resume needs the name of the policy", Exit.USAGE)
        with_database(settings, lambda database: _resume(database, policies, name))
    found = with_database(settings, lambda database: report(database, policies))
    found = [one for one in found if name in (None, one.policy)]
    if as_json:
        print_json(msgspec.to_builtins(found))
    elif not found:
        print("no policy is being rolled out")
    for number, one in enumerate([] if as_json else found):
        if number:
            print()
        show(one)


async def _resume(database: Database, policies: PolicySet, name: str) -> None:
    from gateway.rollouts import state

    version = next(policy.version for policy in policies.written if policy.name == name)
    row = (await state.read(database, [name])).get((name, version))
    if row is None or row.rolled_back_ms is None:
        fail(f"the policy '{name}' was not rolled back: there is nothing to resume")
    await state.resume(database, row)


def show(one: Rollout) -> None:
    """Print a rollout for people."""
    from gateway.rollouts.wording import NAMES, amount, state_of

    print(f"{one.policy}@{one.version} instead of {one.instead_of}, {Path(one.file).name}")
    _line("state", _state(one))
    if one.began_ms is not None:
        _line("since", _moment(one.began_ms))
    if one.steps:
        shown = " -> ".join(f"[{p:g} %]" if number == one.step else f"{p:g} %" for number, p in enumerate(one.steps))
        _line("steps", shown if one.step_ms is None else f"{shown}, at this one since {_moment(one.step_ms)}")
    if one.reason:
        _line("reason", one.reason)
    if one.requests:
        _line("requests", f"{one.requests['new']} new, {one.requests['old']} old, in the present comparison")
    for verdict in one.verdicts:
        measured = ""
        if verdict.new is not None:
            new, old, bound = (amount(verdict.guard, value) for value in (verdict.new, verdict.old, verdict.bound))
            measured = f"{new} new, {old} old, {bound} allowed: "
        _line(verdict.guard, f"{measured}{state_of(verdict)}")
        _line("", NAMES[verdict.guard])
    if one.shadow is not None:
        _print_shadow(one.shadow)
    if one.state == "running":
        print(f"  to finish: give its rules to '{one.instead_of}' and delete {Path(one.file).name}")
    elif one.state == "rolled_back":
        print(f"  edit {Path(one.file).name} to try anew, or: tierline policy rollout {one.policy} --resume")


def _print_shadow(found: ShadowSum) -> None:
    from gateway.ledger.money import format_usd

    if not found.requests:
        _line("requests", "none yet")
        return
    _line("requests", f"{found.requests}, decided alike {found.same / found.requests:.1%}")
    for tier, others in sorted(found.tiers.items()):
        mix = ", ".join(f"{count} to {other}" for other, count in sorted(others.items(), key=lambda pair: -pair[1]))
        _line(tier, mix)
    old, new = found.cost_nanousd, found.shadow_cost_nanousd
    change = f" ({(new - old) / old:+.1%})" if old else ""
    _line("cost", f"${format_usd(old)} as decided, ${format_usd(new)} by the shadow{change}, for the same tokens")


def _state(one: Rollout) -> str:
    share = f"{one.percent:g} % of the {one.by}s"
    if one.state == "running":
        return f"serves {share}"
    if one.state == "shadow":
        return f"shadow: decides {share} in silence, serves nobody"
    if one.state == "rolled_back":
        return f"rolled back on {_moment(one.rolled_back_ms or 0)}: serves nobody"
    return "waits: its time is not now, or no gateway has seen it yet"


def _moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _line(name: str, value: str) -> None:
    print(f"  {name:<17} {value}")
