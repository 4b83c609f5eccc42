"""`tierline policy test`: the examples that policies carry, run and reported."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.common import ConfigOption, Exit, JsonOption, closest, fail, print_json
from gateway.cli.policy_folder import environment

if TYPE_CHECKING:
    from policies.examples import Result


def run_examples(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Policies. Default: all.")] = None,
    policies: Annotated[
        Path | None, typer.Option("--policies", help="Policy folder. Default: policies_dir of the configuration.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decide the examples that policies carry, and compare with what they expect. Nothing is sent anywhere.

    Exit code 1: an example fails, or the policies have errors; 2: there is no such policy.
    """
    from policies.examples import run
    from policies.load import load
    from policies.yamlfile import InvalidFile

    directory, tiers_served, models = environment(policies, config)
    try:
        found = load(directory, tiers_served, models)
    except InvalidFile as error:
        fail(f"the policies have errors:\n{error}")
    known = [policy.name for policy in found.policies]
    for name in names or ():
        if name not in known:
            fail(f"there is no policy '{name}'.{closest(name, known)} Policies: {', '.join(known)}.", Exit.USAGE)
    results = run(found, names)
    failed = [result for result in results if not result.passed]
    if as_json:
        print_json(
            {
                "ok": not failed,
                "examples": len(results),
                "failed": len(failed),
                "results": [{**asdict(result), "passed": result.passed} for result in results],
            }
        )
    else:
        _print(results, failed)
    if failed:
        raise typer.Exit(Exit.FAILED)


def _print(results: list[Result], failed: list[Result]) -> None:
    for result in failed:
        print(f"{result.file}:{result.line}:{result.column}: failed: '{result.name}': {result.wrong}")
    if not results:
        print("no example: write some under 'examples' in a policy")
        return
    count = f"{len(results)} example{'s' if len(results) != 1 else ''}"
    policies = len({result.policy for result in results})
    of = f"of {policies} polic{'ies' if policies != 1 else 'y'}"
    print(f"{count} {of}: {f'{len(failed)} failed' if failed else 'all as expected'}")
