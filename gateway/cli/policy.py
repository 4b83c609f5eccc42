"""`tierline policy`: check policies before they go live, and ask where a request would go and why."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gateway.cli import policy_examples, policy_folder, policy_history, policy_rollout, policy_simulate
from gateway.cli.common import ConfigOption, Exit, JsonOption, fail, print_json, settings_or_exit
from gateway.cli.policy_folder import environment
from tiers import TIERS

app = typer.Typer(no_args_is_help=True, help="Check, test and explain routing policies.")
# Keys that may stand beside a chat request in the file of `explain`, and are not part of it.
_BESIDE = ("organisation", "team", "project", "key", "tags", "budget_used")


@app.command()
def check(
    path: Annotated[
        Path | None, typer.Argument(help="Folder or file. Default: policies_dir of the configuration.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    with_traffic: Annotated[
        bool | None,
        typer.Option(
            "--with-traffic/--without-traffic",
            help="Compare budgets with the ledger's last four weeks. Default: where the ledger is a file here.",
        ),
    ] = None,
) -> None:
    """Every problem with file, line and column. A folder also for conflicts between its policies.

    Exit code 0: no error (warnings may be listed); 1: errors.
    """
    from gateway.escalating.confidence import uncalibrated as missing_curves
    from policies.check import check as check_policies

    directory, tiers_served, models = environment(path, config)
    if not directory.exists():
        fail(f"{directory} does not exist", Exit.USAGE)
    uncalibrated = None if tiers_served is None else missing_curves(settings_or_exit(config))
    report = check_policies(directory, tiers_served, models, uncalibrated)
    if tiers_served is not None or with_traffic:
        report = policy_folder.advised(report, settings_or_exit(config), with_traffic=with_traffic)
    if as_json:
        print_json(report.as_json())
    else:
        print(report.as_text())
    if not report.ok:
        raise typer.Exit(Exit.FAILED)


@app.command()
def explain(
    file: Annotated[
        Path,
        typer.Option("--file", "-f", help="A chat request as JSON; '-': standard input. It may hold team, ... too."),
    ],
    team: Annotated[str | None, typer.Option(help="Team of the key.")] = None,
    organisation: Annotated[str | None, typer.Option(help="Organisation of the key.")] = None,
    project: Annotated[str | None, typer.Option(help="Project of the key.")] = None,
    key: Annotated[str | None, typer.Option(help="Id of the key.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="NAME=VALUE; may be repeated.")] = None,
    pin: Annotated[str | None, typer.Option("--tier", help="As if the client pinned this tier.")] = None,
    budget_used: Annotated[float | None, typer.Option(help="Share of the month's budget that is spent.")] = None,
    at: Annotated[
        str | None, typer.Option("--at", help="As if it were asked then, such as '2026-12-24 08:00 Europe/Berlin'.")
    ] = None,
    policies: Annotated[
        Path | None, typer.Option("--policies", help="Policy folder. Default: policies_dir of the configuration.")
    ] = None,
    learnt: Annotated[
        bool, typer.Option("--learnt", help="With tier: auto: by what the gateways have learnt, from the database.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Where a request would go, by which rule, and what the rules saw. Nothing is sent anywhere.

    Exit code 1: the policies have errors; 2: the request or an option cannot be used.
    """
    from gateway.cli.vectors import vector_of
    from policies.explain import explain as explain_request
    from policies.facts import Context, from_chat
    from policies.load import Subject, load
    from policies.yamlfile import InvalidFile
    from tiers.task import default_classifier

    body, beside = _request(file)
    if pin is not None and pin not in TIERS:
        fail(f"there is no tier '{pin}'; tiers are {', '.join(TIERS)}", Exit.USAGE)
    directory, tiers_served, models = environment(policies, config)
    try:
        found = load(directory, tiers_served, models)
    except InvalidFile as error:
        fail(f"the policies have errors:\n{error}")
    moment = datetime.now(UTC) if at is None else _moment(at)
    found = found.at(moment)
    subject = Subject(
        organisation=organisation or beside.get("organisation", ""),
        team=team or beside.get("team", ""),
        project=project or beside.get("project", ""),
        key=key or beside.get("key", ""),
        model=body.get("model", "auto"),
    )
    context = Context(
        organisation=subject.organisation,
        team=subject.team,
        project=subject.project,
        key=subject.key,
        tags=tuple(tag or beside.get("tags", ())),
        budget_used=float(beside.get("budget_used", 0.0)) if budget_used is None else budget_used,
        pinned_tier=pin,
        now=moment.astimezone().replace(tzinfo=None),
    )
    profile = default_classifier().classify(
        body["messages"],
        tools=bool(body.get("tools")),
        response_format=body.get("response_format"),
        max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
        vector=vector_of(body["messages"], config),
    )
    chosen_by = policy_folder.learnt(settings_or_exit(config)) if learnt else None
    explanation = explain_request(found, subject, from_chat(body, context, profile), chosen_by)
    if as_json:
        print_json(explanation.as_json())
    else:
        print(explanation.as_text())


app.command("test")(policy_examples.run_examples)
app.command()(policy_simulate.simulate)
app.command()(policy_history.history)
app.command()(policy_history.show)
app.command()(policy_history.diff)
app.command()(policy_rollout.rollout)


@app.command()
def schema(
    of: Annotated[
        Literal["policy", "tierline"], typer.Option(help="Which file: a policy or tierline.yaml.")
    ] = "policy",
    write: Annotated[Path | None, typer.Option(help="Write it here instead of printing it.")] = None,
) -> None:
    """The JSON Schema of a policy or of tierline.yaml; editors complete and check YAML with it."""
    if of == "policy":
        from policies.schema.document import json_schema

        text = json_schema()
    else:
        text = platform_schema()
    if write is None:
        print(text, end="")
    else:
        write.write_text(text, encoding="utf-8")


def platform_schema() -> str:
    """The published JSON Schema of `tierline.yaml`, as text."""
    from gateway.settings import Settings

    found = Settings.model_json_schema(mode="validation")
    found = {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": "Tierline platform file"}
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def _moment(text: str) -> datetime:
    """A moment of the command line, or exit code 2."""
    from policies.schema.moments import moment

    try:
        return moment(text)
    except ValueError as error:
        fail(f"--at: {error}", Exit.USAGE)


def _request(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The chat request, and what stands beside it; or exit code 2."""
    try:
        data = json.loads(sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(f"{file}: {error}", Exit.USAGE)
    messages = data.get("messages") if isinstance(data, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        fail(f"{file}: expected a chat request: an object with 'messages', a list of messages", Exit.USAGE)
    beside = {name: data[name] for name in _BESIDE if name in data}
    for name, kind in (("tags", list), ("budget_used", (int, float))):
        if name in beside and not isinstance(beside[name], kind):
            wanted = "a list of NAME=VALUE" if name == "tags" else "a number"
            fail(f"{file}: '{name}' must be {wanted}", Exit.USAGE)
    for name in _BESIDE[:4]:
        if not isinstance(beside.get(name, ""), str):
            fail(f"{file}: '{name}' must be text", Exit.USAGE)
    return {name: value for name, value in data.items() if name not in _BESIDE}, beside
