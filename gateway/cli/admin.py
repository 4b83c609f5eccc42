"""`tierline admin`: keys of the admin API, and the audit log. The work is in `gateway.access`, the words are here."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from gateway.cli.common import (
    Column,
    ConfigOption,
    JsonOption,
    duration,
    print_json,
    print_table,
    settings_or_exit,
    with_database,
)
from gateway.cli.secrets import OverlapOption, old_secret, overlap_ms, print_token, state_cell, when
from gateway.settings import Settings

if TYPE_CHECKING:
    from gateway.access.admin_keys import AdminKeyInfo, CreatedAdminKey
    from gateway.access.audit import AuditRow
    from gateway.ledger.database import Database

app = typer.Typer(no_args_is_help=True, help="Keys of the admin API, and the audit log.")
keys_app = typer.Typer(no_args_is_help=True)
app.add_typer(keys_app, name="keys", help="Create, list, rotate and revoke keys of the admin API.")

_Result = TypeVar("_Result")
KeyArgument = Annotated[str, typer.Argument(help="Id, shown prefix (tla-…) or name of the admin key.")]


@keys_app.command()
def create(
    name: Annotated[str, typer.Option(help="Who or what it is for.")],
    role: Annotated[Literal["read", "write"], typer.Option(help="What it may do.")] = "read",
    organisation: Annotated[
        str | None, typer.Option(help="The only organisation that it is for. Default: all, and the gateway itself.")
    ] = None,
    expires: Annotated[str | None, typer.Option(metavar="TIME", help="From now: 12h, 30d, 4w. Default: never.")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make an admin key and print it: this is the only time it is shown.

    Exit code 2: a name, organisation or time that makes no sense.
    """
    from gateway.access.admin_keys import create_admin_key
    from gateway.access.keys import open_secret

    expires_ms = None
    if expires is not None:
        expires_ms = int((datetime.now(UTC) + duration(expires, "--expires")).timestamp() * 1000)
    settings = settings_or_exit(config)

    async def run(database: Database) -> CreatedAdminKey:
        secret = await open_secret(database, settings.storage.data_dir / "secret")
        return await create_admin_key(
            database, secret, name=name, role=role, organisation=organisation, expires_ms=expires_ms
        )

    _print_token(_with_database(settings, run), as_json)


@keys_app.command("list")
def list_(
    everything: Annotated[bool, typer.Option("--all", help="Revoked keys too.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show admin keys, without the secret part. Times are UTC."""
    from gateway.access.admin_keys import list_admin_keys

    known = _with_database(settings_or_exit(config), list_admin_keys)
    found = [info for info in known if everything or info.revoked_ms is None]
    if as_json:
        print_json([_public(info) for info in found])
        return
    columns = [Column("id", "value"), Column("name"), Column("prefix", "value"), Column("role"), Column("organisation")]
    columns += [Column("created", "value"), Column("expires", "value"), Column("state")]
    print_table(columns, [_row(info) for info in found])


@keys_app.command()
def rotate(
    key: KeyArgument,
    overlap: OverlapOption = "24h",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give an admin key a new secret and print it, this once.

    Exit code 2: no such key, or one that is revoked or has expired.
    """
    from gateway.access.admin_keys import rotate_admin_key
    from gateway.access.keys import open_secret

    milliseconds = overlap_ms(overlap)
    settings = settings_or_exit(config)

    async def run(database: Database) -> CreatedAdminKey:
        return await rotate_admin_key(
            database, await open_secret(database, settings.storage.data_dir / "secret"), key, milliseconds
        )

    created = _with_database(settings, run)
    _print_token(created, as_json, note=old_secret(created.info.replaced[0], milliseconds))


@keys_app.command()
def revoke(key: KeyArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Revoke an admin key for good. The next request with it is refused."""
    from gateway.access.admin_keys import revoke_admin_key

    info = _with_database(settings_or_exit(config), lambda database: revoke_admin_key(database, key))
    if as_json:
        print_json(_public(info))
    else:
        print(f"revoked {info.prefix}… ('{info.name}')")


@app.command()
def audit(
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most so many, the latest first.")] = 50,
    actor: Annotated[str | None, typer.Option(help="Only changes by admin:ID or cli:USER.")] = None,
    action: Annotated[str | None, typer.Option(help="Only one kind of change, such as key.create.")] = None,
    object: Annotated[str | None, typer.Option(help="Only changes of one thing, such as key:ID.")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Who changed what, from the command line and over HTTP. Times are UTC."""
    from gateway.access.audit import audit_rows

    async def run(database: Database) -> list[AuditRow]:
        return await audit_rows(database, limit=limit, actor=actor, action=action, object=object)

    found = _with_database(settings_or_exit(config), run)
    if as_json:
        import msgspec

        print_json([msgspec.structs.asdict(row) for row in found])
        return
    columns = [Column("time", "value"), Column("actor"), Column("action", "value"), Column("object", "value")]
    columns += [Column("before"), Column("after"), Column("address", "value")]
    print_table(
        columns,
        [
            [when(row.ts_ms), row.actor, row.action, row.object, _fields(row.before), _fields(row.after), row.address]
            for row in found
        ],
    )


def _fields(values: dict[str, Any] | None) -> str:
    if values is None:
        return "-"
    return ", ".join(f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in values.items())


def _with_database(settings: Settings, work: Callable[[Database], Awaitable[_Result]]) -> _Result:
    from gateway.access.admin_keys import InvalidAdminKeyRequest
    from gateway.access.keys import SecretMismatch
    from gateway.access.secret import InvalidSecret

    return with_database(settings, work, usage=(InvalidAdminKeyRequest,), failures=(SecretMismatch, InvalidSecret))


def _print_token(created: CreatedAdminKey, as_json: bool, note: str = "") -> None:
    info = created.info
    what = f"Admin key '{info.name}', role {info.role}, for {_reach(info)}, id {info.key_id}"
    print_token(created.token, what, _public(info), as_json, note=note)


def _row(info: AdminKeyInfo) -> list[str]:
    return [
        info.key_id,
        info.name,
        f"{info.prefix}…",
        info.role,
        _reach(info),
        when(info.created_ms),
        when(info.expires_ms),
        state_cell(info.state, info.replaced),
    ]


def _reach(info: AdminKeyInfo) -> str:
    return info.organisation or "all"


def _public(info: AdminKeyInfo) -> dict[str, Any]:
    import msgspec

    return {**msgspec.to_builtins(info), "state": info.state}
