"""`tierline keys`: create, list, change, rotate and revoke API keys.

The work is in `gateway.access.keys`, the words here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gateway.cli.ceilings import (
    NONE,
    BudgetOption,
    ParallelOption,
    RequestsOption,
    TokensOption,
    limit_cells,
    limit_change,
    names,
)
from gateway.cli.common import (
    Column,
    ConfigOption,
    Exit,
    JsonOption,
    check_models,
    duration,
    fail,
    print_json,
    print_table,
    settings_or_exit,
    with_database,
)
from gateway.cli.secrets import OverlapOption, old_secret, overlap_ms, print_token, state_cell, when
from gateway.settings import Settings

if TYPE_CHECKING:
    from gateway.access.keys import CreatedKey, KeyInfo
    from gateway.ledger.database import Database

app = typer.Typer(no_args_is_help=True, help="Create, list, change, rotate and revoke API keys.")

_Result = TypeVar("_Result")
KeyArgument = Annotated[str, typer.Argument(help="Id, shown prefix (tl-…) or name of the key.")]


@app.command()
def create(
    organisation: Annotated[str, typer.Option(help="Who pays; made if new.")] = "default",
    team: Annotated[str, typer.Option(help="Team of the organisation; made if new.")] = "default",
    project: Annotated[str, typer.Option(help="Project of the team; made if new.")] = "default",
    name: Annotated[str, typer.Option(help="What the key is for.")] = "default",
    expires: Annotated[
        str | None, typer.Option(metavar="WHEN", help="A date (2027-01-31) or a time from now (5m, 12h, 30d, 4w).")
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
    tier: Annotated[list[str] | None, typer.Option("--tier", help="Allow only this tier; repeat for more.")] = None,
    route: Annotated[
        list[str] | None, typer.Option("--route", help="Allow only this route, such as chat; repeat for more.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it: this is the only time it is shown.

    Exit code 2: a name, model, tier, route, limit or time that makes no sense.
    """
    from gateway.access.keys import KeyLimits, create_key, open_secret
    from gateway.ledger.money import InvalidAmount, parse_usd

    try:
        budget = None if budget_usd is None else parse_usd(budget_usd)
    except InvalidAmount as error:
        fail(f"--budget-usd: {error}", Exit.USAGE)
    expires_ms = None if expires is None else _expiry(expires)
    settings = settings_or_exit(config)
    check_models(settings, model or (), "--model", also=("auto",))

    async def run(database: Database) -> CreatedKey:
        return await create_key(
            database,
            await open_secret(database, settings.storage.data_dir / "secret"),
            organisation=organisation,
            team=team,
            project=project,
            name=name,
            expires_ms=expires_ms,
            limits=KeyLimits(rpm, tpm, parallel),
            budget_nanousd=budget,
            allowed_models=model or None,
            allowed_tiers=tier or None,
            allowed_routes=route or None,
        )

    _print_token(_with_database(settings, run), as_json)


@app.command("list")
def list_(
    everything: Annotated[bool, typer.Option("--all", help="Revoked keys too.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show keys, without the secret part. Times are UTC."""
    from gateway.access.keys import list_keys

    known = _with_database(settings_or_exit(config), list_keys)
    found = [info for info in known if everything or info.revoked_ms is None]
    if as_json:
        print_json([_public(info) for info in found])
        return
    columns = [Column("id", "value"), Column("name"), Column("prefix", "value")]
    columns += [Column(title) for title in ("organisation", "team", "project")]
    columns += [Column(title, "number") for title in ("rpm", "tpm", "parallel", "budget $")]
    columns += [
        Column("models"),
        Column("tiers"),
        Column("routes"),
        Column("created", "value"),
        Column("expires", "value"),
        Column("state"),
    ]
    print_table(columns, [_row(info) for info in found])
    print(f"\n{len(found)} keys" if len(found) != 1 else "\n1 key")


@app.command("set")
def set_(
    key: KeyArgument,
    name: Annotated[str | None, typer.Option(help="A new name.")] = None,
    expires: Annotated[str | None, typer.Option(metavar="WHEN|none", help="As for `create`; none: never.")] = None,
    rpm: RequestsOption = None,
    tpm: TokensOption = None,
    parallel: ParallelOption = None,
    budget_usd: BudgetOption = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Allow only these; repeat for more. none: all.")
    ] = None,
    tier: Annotated[list[str] | None, typer.Option("--tier", help="Likewise.")] = None,
    route: Annotated[list[str] | None, typer.Option("--route", help="Likewise.")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change limits, budget, expiry or what a key may use. What is not named stays; `none` takes a limit away.

    Running gateways keep to it within a second; answers under way are finished.

    Exit code 2: no such key, or a value that makes no sense.
    """
    import msgspec

    from gateway.access.ceilings import KeyChange
    from gateway.access.keys import change_key

    settings = settings_or_exit(config)
    models = names(model)
    if isinstance(models, list):
        check_models(settings, models, "--model", also=("auto",))
    change = KeyChange(
        **msgspec.structs.asdict(limit_change(rpm, tpm, parallel, budget_usd)),
        name=msgspec.UNSET if name is None else name,
        expires_ms=msgspec.UNSET if expires is None else None if expires == NONE else _expiry(expires),
        allowed_models=models,
        allowed_tiers=names(tier),
        allowed_routes=names(route),
    )
    info = _with_database(settings, lambda database: change_key(database, key, change))
    if as_json:
        print_json(_public(info))
    else:
        print(f"set {info.prefix}… ('{info.name}' of {_owner(info)})")


@app.command()
def rotate(
    key: KeyArgument,
    overlap: OverlapOption = "24h",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a key a new secret and print it, this once. Id, limits, budget, spend and policies stay.

    During the overlap both secrets work, on the same budget; logs show the prefix of the one that was used.

    Exit code 2: no such key, or one that is revoked or has expired.
    """
    from gateway.access.keys import open_secret, rotate_key

    milliseconds = overlap_ms(overlap)
    settings = settings_or_exit(config)

    async def run(database: Database) -> CreatedKey:
        return await rotate_key(
            database, await open_secret(database, settings.storage.data_dir / "secret"), key, milliseconds
        )

    created = _with_database(settings, run)
    _print_token(created, as_json, note=old_secret(created.info.replaced[0], milliseconds))


@app.command()
def revoke(key: KeyArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Revoke a key for good. Running gateways refuse it within a second; answers under way are finished."""
    from gateway.access.keys import revoke_key

    info = _with_database(settings_or_exit(config), lambda database: revoke_key(database, key))
    if as_json:
        print_json(_public(info))
    else:
        print(f"revoked {info.prefix}… ('{info.name}' of {_owner(info)})")


def _print_token(created: CreatedKey, as_json: bool, note: str = "") -> None:
    info = created.info
    what = f"Key '{info.name}' of {_owner(info)}, id {info.key_id}"
    print_token(created.token, what, _public(info), as_json, note=note)


def _with_database(settings: Settings, work: Callable[[Database], Awaitable[_Result]]) -> _Result:
    """Run `work` on the configured database, with what can be wrong with keys said in words."""
    from gateway.access.keys import InvalidKeyRequest, SecretMismatch
    from gateway.access.secret import InvalidSecret

    return with_database(settings, work, usage=(InvalidKeyRequest,), failures=(SecretMismatch, InvalidSecret))


def _expiry(text: str) -> int:
    """When a key ends, UTC milliseconds: a time from now, or a moment."""
    from gateway.ledger.reports import InvalidReport, parse_moment

    if text[:-1].isdecimal() and text[-1:].isalpha():
        return int((datetime.now(UTC) + duration(text, "--expires")).timestamp() * 1000)
    try:
        return int(parse_moment(text).timestamp() * 1000)
    except InvalidReport:
        fail(f"--expires: '{text}' is neither a date (2027-01-31) nor a time from now (5m, 12h, 30d)", Exit.USAGE)


def _row(info: KeyInfo) -> list[str]:
    scopes = (info.allowed_models, info.allowed_tiers, info.allowed_routes)
    return [
        info.key_id,
        info.name,
        f"{info.prefix}…",
        info.organisation,
        info.team,
        info.project,
        *limit_cells(info),
        *("all" if allowed is None else ", ".join(allowed) for allowed in scopes),
        when(info.created_ms),
        when(info.expires_ms),
        state_cell(info.state, info.replaced),
    ]


def _owner(info: KeyInfo) -> str:
    return f"{info.organisation}/{info.team}/{info.project}"


def _public(info: KeyInfo) -> dict[str, Any]:
    import msgspec

    def iso(ms: int | None) -> str | None:
        return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC).isoformat().replace("+00:00", "Z")

    fields = msgspec.structs.asdict(info)
    for name in ("created", "expires", "revoked"):
        fields[name] = iso(fields.pop(f"{name}_ms"))
    fields["replaced"] = [
        {"prefix": secret.prefix, "replaced": iso(secret.replaced_ms), "valid_until": iso(secret.valid_until_ms)}
        for secret in info.replaced
    ]
    return {**fields, "state": info.state}
