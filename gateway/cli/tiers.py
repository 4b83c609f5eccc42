"""`tierline tiers`: judge the choice of tiers with your own prompts; what tiers cost, and what was learnt of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli import tiers_forget, tiers_learnt
from gateway.cli.calibrate import calibrate
from gateway.cli.common import Exit, JsonOption, fail, print_json
from tiers import TIERS
from tiers.choose import DEFAULT_TIER, QUALITY_TARGET

app = typer.Typer(no_args_is_help=True, help="How good tiers are, and what they cost.")
app.command()(calibrate)
app.command()(tiers_learnt.estimate)
app.command()(tiers_learnt.show)
app.command()(tiers_forget.forget)


@app.command()
def evaluate(
    file: Annotated[
        Path, typer.Option("--file", "-f", help="JSON lines: messages, optional tier or task. '-': standard input.")
    ],
    quality_target: Annotated[float, typer.Option(help="P(success) that is good enough.")] = QUALITY_TARGET,
    default_tier: Annotated[str, typer.Option(help="Tier for prompts that nobody can tell.")] = DEFAULT_TIER,
    as_json: JsonOption = False,
) -> None:
    """Decide each prompt as `tier: auto` would, and compare with the labels where there are any.

    Exit code 1: no prompt in the file; 2: a line or an option that cannot be used.
    """
    from tiers.evaluate import InvalidPrompts, judge, read, summary
    from tiers.task import default_classifier

    if default_tier not in TIERS:
        fail(f"there is no tier '{default_tier}'; tiers are {', '.join(TIERS)}", Exit.USAGE)
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        judged = judge(
            read(text.split("\n")), default_classifier(), quality_target=quality_target, default_tier=default_tier
        )
    except (OSError, UnicodeDecodeError, InvalidPrompts, ValueError) as error:
        fail(f"{file}: {error}", Exit.USAGE)
    if not judged:
        fail(f"{file}: no prompt in it")
    found = summary(judged)
    if found["unknown_task_labels"]:
        print(f"tierline: labels that are no task of ours: {', '.join(found['unknown_task_labels'])}", file=sys.stderr)
    if as_json:
        print_json({**found, "decisions": [item.as_json() for item in judged]})
        return
    for item in judged:
        mark = {True: "right", False: "wrong", None: ""}[
            item.task_right if item.tier_right is None else item.tier_right
        ]
        print(f"{item.prompt.line:>5}  {item.tier:<7} {item.task:<19} {item.confidence:4.0%}  {mark:<6} {item.reason}")
    print()
    for name, value in found.items():
        print(f"{name:<20} {value if value is not None else '-'}")
