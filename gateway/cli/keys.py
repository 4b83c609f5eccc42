"""`tierline keys`: create, list and revoke API keys. The work is in `gateway.access.keys`; here are the words."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from gateway.cli.common import ConfigOption, Exit, JsonOption, fail, print_json, settings_or_exit

app = typer.Typer(no_args_is_help=True, help="Create, list and revoke API keys.")

_Result = TypeVar("_Result")


@app.command()
def create(
    organisation: Annotated[str, typer.Option(help="Who pays; made if new.")] = "default",
    team: Annotated[str, typer.Option(help="Team of the organisation; made if new.")] = "default",
    project: Annotated[str, typer.Option(help="Project of the team; made if new.")] = "default",
    name: Annotated[str, typer.Option(help="What the key is for.")] = "default",
    expires: Annotated[
        str | None, typer.Option(metavar="WHEN", help="A date (2027-01-31) or a time from now (30d, 12h).")
    ] = None,
    rpm: Annotated[int | None, typer.Option("--rpm", help="Requests per minute.", min=1)] = None,
    tpm: Annotated[int | None, typer.Option("--tpm", help="Tokens per minute.", min=1)] = None,
    parallel: Annotated[int | None, typer.Option(help="Requests at once.", min=1)] = None,
    budget_usd: Annotated[
        str | None, typer.Option("--budget-usd", metavar="DOLLARS", help="Budget per calendar month (UTC).")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Allow only this model; repeat for more. 'auto' is one.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it: this is the only time it is shown."""
    from gateway.access.keys import KeyLimits, create_key, load_secret
    from gateway.ledger.money import InvalidAmount, parse_usd

    try:
        budget = None if budget_usd is None else parse_usd(budget_usd)
    except InvalidAmount as error:
        fail(f"--budget-usd: {error}", Exit.USAGE)
    expires_ms = None if expires is None else _expiry(expires)

    async def run(database: Any, data_dir: Path) -> Any:
        return await create_key(
            database,
            load_secret(data_dir / "secret"),
            organisation=organisation,
            team=team,
            project=project,
            name=name,
            expires_ms=expires_ms,
            limits=KeyLimits(rpm, tpm, parallel),
            budget_nanousd=budget,
            allowed_models=model or None,
        )

    created = _with_database(config, run)
    if as_json:
        print_json({**_public(created.info), "key": created.token})
        return
    info = created.info
    print(created.token)
    typer.echo(
        f"\nKey '{info.name}' of {info.organisation}/{info.team}/{info.project}, id {info.key_id}.\n"
        f"Keep it now: it is stored only as a hash and cannot be shown again.",
        err=True,
    )


@app.command("list")
def list_(
    everything: Annotated[bool, typer.Option("--all", help="Revoked keys too.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show keys, without the secret part."""
    from gateway.access.keys import list_keys
    from gateway.ledger.money import format_usd

    async def run(database: Any, _: Path) -> Any:
        return await list_keys(database)

    found = [info for info in _with_database(config, run) if everything or info.revoked_ms is None]
    if as_json:
        print_json([_public(info) for info in found])
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("key", no_wrap=True)
    for title in ("name", "organisation/team/project", "state", "rpm", "tpm", "parallel", "budget", "models"):
        table.add_column(title, overflow="fold")
    for info in found:
        owner = f"{info.organisation}/{info.team}/{info.project}"
        limits = [str(n or "-") for n in (info.requests_per_minute, info.tokens_per_minute, info.parallel)]
        budget = "-" if info.budget_nanousd is None else f"${format_usd(info.budget_nanousd)}"
        models = "all" if info.allowed_models is None else ", ".join(info.allowed_models)
        cells = (f"{info.prefix}…", info.name, owner, info.state, *limits, budget, models)
        table.add_row(*(Text(cell) for cell in cells))
    Console().print(table)
    print(f"\n{len(found)} keys" if len(found) != 1 else "\n1 key")


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="Id, shown prefix (tl-…) or name of the key.")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Revoke a key for good. Running gateways refuse it within a second; answers under way are finished."""
    from gateway.access.keys import revoke_key

    async def run(database: Any, _: Path) -> Any:
        return await revoke_key(database, key)

    info = _with_database(config, run)
    if as_json:
        print_json(_public(info))
    else:
        print(f"revoked {info.prefix}… ('{info.name}' of {info.organisation}/{info.team}/{info.project})")


def _with_database(config: Path | None, work: Callable[[Any, Path], Awaitable[_Result]]) -> _Result:
    """Run `work` on the configured database, with every expected failure said in words."""
    from sqlalchemy.exc import DBAPIError

    from gateway.access.keys import InvalidKeyRequest, SecretMismatch
    from gateway.access.secret import InvalidSecret
    from gateway.ledger.database import Database, DatabaseError

    settings = settings_or_exit(config)

    async def run() -> _Result:
        database = await Database.open(settings.database_url())
        try:
            return await work(database, settings.storage.data_dir)
        finally:
            await database.close()

    try:
        return asyncio.run(run())
    except InvalidKeyRequest as error:
        fail(str(error), Exit.USAGE)
    except (DatabaseError, SecretMismatch, InvalidSecret) as error:
        fail(str(error))
    except DBAPIError as error:
        fail(f"the database failed: {error.orig}")


def _expiry(text: str) -> int:
    from gateway.ledger.reports import InvalidReport, parse_moment

    now = datetime.now(UTC)
    try:
        moment = parse_moment(text, now)
    except InvalidReport:
        fail(f"--expires: '{text}' is neither a date (2027-01-31) nor a time from now (30d, 12h)", Exit.USAGE)
    if text[:-1].isdecimal():
        moment = now + (now - moment)
    return int(moment.timestamp() * 1000)


def _public(info: Any) -> dict[str, Any]:
    import msgspec

    def when(ms: int | None) -> str | None:
        return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC).isoformat().replace("+00:00", "Z")

    fields = msgspec.structs.asdict(info)
    for name in ("created", "expires", "revoked"):
        fields[name] = when(fields.pop(f"{name}_ms"))
    return {**fields, "state": info.state}
