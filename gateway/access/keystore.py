"""Keys in memory: what authenticates a request, without a database on its way.

A snapshot of all keys and of the limits above them, taken again when the database's key version has moved: it is
looked at every half second, so that a revoked key is refused within a second, and a new limit holds as soon. A token
that the snapshot does not know may be a key made a moment ago: `authenticate_fresh` looks once more, together with
everybody else who is waiting, at most ten times a second.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from sqlalchemy import or_, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.access.limits import Scope
from gateway.access.principal import ExpiredKey, InvalidKey, KeyLimits, Principal, RevokedKey
from gateway.access.secret import PREFIX, ServerSecret, has_secret, load_secret, shown_prefix
from gateway.ledger.database import Database
from gateway.ledger.rows import now_ms
from gateway.ledger.schema import facts, keys, organisations, projects, replaced_secrets, teams
from gateway.settings import LimitSettings

logger = logging.getLogger("tierline.access")

POLL_S: Final = 0.5
# Unknown tokens may ask for a new snapshot this often in all, however many there are.
_REFRESH_INTERVAL_S: Final = 0.1
_MAX_TOKEN_CHARACTERS: Final = 256


class SecretMismatch(Exception):
    """The server secret is not the one the keys were made with: every key would be unknown."""


class _Entry(msgspec.Struct, frozen=True):
    digest: str
    principal: Principal
    revoked: bool
    replaced_until_ms: int | None = None  # of a secret that the key had before it was rotated


class KeyStore:
    """All keys of a database. `start` loads them and keeps them fresh; `stop` ends that."""

    def __init__(self, database: Database, secret: ServerSecret, defaults: LimitSettings | None = None) -> None:
        self._database = database
        self._secret = secret
        self._defaults = defaults or LimitSettings()
        self._entries: dict[str, _Entry] = {}
        self._by_id: dict[str, _Entry] = {}
        self._version: str | None = None
        self._loaded_s = self._tried_s = -1.0
        self._refreshing: asyncio.Task[None] | None = None
        self._poller: asyncio.Task[None] | None = None
        self._failing = False

    async def start(self) -> None:
        """Load the keys, then watch for changes.

        Raises:
            DBAPIError, OSError: the database is out; there is nothing to fall back to.
            SecretMismatch: the server secret is not the one the keys were made with.
        """
        await check_secret(self._database, self._secret)
        await self.refresh()
        self._poller = asyncio.create_task(self._poll(), name="key-poll")

    async def stop(self) -> None:
        for task in (self._poller, self._refreshing):
            if task:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def age_s(self) -> float:
        """How long ago the keys were last known to be fresh: grows while the database is out."""
        return time.monotonic() - self._loaded_s

    def authenticate(self, token: str) -> Principal:
        """Who holds this token, by the snapshot in memory.

        Raises:
            InvalidKey, ExpiredKey, RevokedKey: why not.
        """
        if not token.startswith(PREFIX) or len(token) > _MAX_TOKEN_CHARACTERS:
            raise InvalidKey("this is not an API key of this gateway: those start with 'tl-'")
        digest = self._secret.digest(token)
        entry = self._entries.get(digest)
        # The look-up is by a keyed hash, whose timing tells nothing about tokens; comparing takes constant time anyway.
        if entry is None or not hmac.compare_digest(entry.digest, digest):
            raise InvalidKey("this API key is not known here")
        if entry.revoked:
            raise RevokedKey(f"the API key {shown_prefix(token)}… has been revoked")
        expires = entry.principal.expires_ms
        if expires is not None and now_ms() >= expires:
            raise ExpiredKey(f"the API key {shown_prefix(token)}… has expired")
        if entry.replaced_until_ms is not None and now_ms() >= entry.replaced_until_ms:
            raise ExpiredKey(f"the API key {shown_prefix(token)}… was rotated and has expired: use its new secret")
        return entry.principal

    async def authenticate_fresh(self, token: str) -> Principal:
        """Like `authenticate`, but a token that is not known is looked up in the database before it is refused.

        Raises:
            InvalidKey, ExpiredKey, RevokedKey: why not.
        """
        try:
            return self.authenticate(token)
        except InvalidKey:
            if not token.startswith(PREFIX) or len(token) > _MAX_TOKEN_CHARACTERS:
                raise
        await self._look_again()
        return self.authenticate(token)

    def known(self, key_id: str) -> Principal | None:
        """The key with this id, by the snapshot in memory; None: unknown, revoked or expired."""
        entry = self._by_id.get(key_id)
        if entry is None or entry.revoked:
            return None
        expires = entry.principal.expires_ms
        return None if expires is not None and now_ms() >= expires else entry.principal

    async def holder(self, key_id: str) -> Principal | None:
        """The key with this id and what limits it, as they are in the database now, or, where that is out, as they were
        last; None: unknown or revoked.
        """
        await self._look_again()
        for entry in self._entries.values():
            if entry.principal.key_id == key_id and not entry.revoked and entry.replaced_until_ms is None:
                return entry.principal
        return None

    async def refresh(self) -> None:
        """Read the keys again if they have changed.

        Raises:
            DBAPIError, OSError: the database is out; the last snapshot stays.
        """
        started = self._tried_s = time.monotonic()
        async with self._database.read() as connection:
            version = await connection.scalar(select(facts.c.value).where(facts.c.name == "keys_version"))
            if version != self._version or self._loaded_s < 0:
                joined = keys.join(projects).join(teams).join(organisations)
                named = [
                    projects.c.name.label("project_name"),
                    teams.c.id.label("team_id"),
                    teams.c.name.label("team_name"),
                    organisations.c.id.label("organisation_id"),
                    organisations.c.name.label("organisation_name"),
                ]
                levels = await _limited_levels(connection)
                found = (await connection.execute(select(keys, *named).select_from(joined))).mappings()
                entries = {row["id"]: self._entry(dict(row), levels) for row in found}
                self._by_id = entries
                self._entries = {entry.digest: entry for entry in entries.values()}
                for row in (await connection.execute(select(replaced_secrets))).mappings():
                    now = entries[row["key_id"]]
                    who = msgspec.structs.replace(now.principal, key_prefix=row["prefix"])  # logs tell who is behind
                    who = msgspec.structs.replace(who, scopes=(who.scope(), *who.scopes[1:]))
                    self._entries[row["digest"]] = _Entry(row["digest"], who, now.revoked, row["valid_until_ms"])
                self._version = version
        self._loaded_s = started
        if self._failing:
            self._failing = False
            logger.info("the keys are fresh again")

    async def _look_again(self) -> None:
        """Have a snapshot that is no older than this call, if the database allows."""
        asked = time.monotonic()
        try:
            while self._loaded_s < asked:
                await self._shared_refresh()
        except (DBAPIError, OSError) as error:
            self._complain(error)

    async def _shared_refresh(self) -> None:
        """Join the refresh that is on its way, or start one, not too soon after the last."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._paced_refresh(), name="key-refresh")
        # A caller that is cancelled must not cancel it for the others.
        await asyncio.shield(self._refreshing)

    async def _paced_refresh(self) -> None:
        await asyncio.sleep(max(0.0, self._tried_s + _REFRESH_INTERVAL_S - time.monotonic()))
        await self.refresh()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._shared_refresh()
            except (DBAPIError, OSError) as error:
                self._complain(error)

    def _complain(self, error: Exception) -> None:
        if not self._failing:
            self._failing = True
            reason = error.orig if isinstance(error, DBAPIError) else error
            logger.error("cannot read the keys, going on with those known: %s", reason)

    def _entry(self, row: dict[str, object], levels: Mapping[str, Scope]) -> _Entry:
        limits = {name: _or(row[name], getattr(self._defaults, name)) for name in KeyLimits.__struct_fields__}
        fields = {name: row[name] for name in Principal.__struct_fields__ if name in row}
        fields |= {
            "key_id": row["id"],
            "key_prefix": row["prefix"],
            "key_name": row["name"],
            "limits": limits,
            **{name: read_list(row[name]) for name in ("allowed_models", "allowed_tiers", "allowed_routes")},
        }
        principal = msgspec.convert(fields, Principal)
        above = [f"{kind}:{row[f'{kind}_id']}" for kind in ("project", "team", "organisation")]
        principal = msgspec.structs.replace(
            principal,
            scopes=(principal.scope(), *(levels[scope] for scope in above if scope in levels)),
            unlimited=tuple(scope for scope in above if scope not in levels),
        )
        return _Entry(str(row["digest"]), principal, row["revoked_ms"] is not None)


async def _limited_levels(connection: AsyncConnection) -> dict[str, Scope]:
    """The organisations, teams and projects that have a limit, by their scope ids."""
    limited: dict[str, Scope] = {}
    for kind, table in (("organisation", organisations), ("team", teams), ("project", projects)):
        limits = [table.c[name] for name in ("requests_per_minute", "tokens_per_minute", "parallel", "budget_nanousd")]
        some = or_(*(limit.is_not(None) for limit in limits))
        for row in await connection.execute(select(*limits, table.c.id, table.c.name).where(some)):
            scope, label = f"{kind}:{row.id}", f"The {kind} '{row.name}'"
            limited[scope] = Scope(scope, row[0], row[1], row[2], row[3], label)
    return limited


async def open_secret(database: Database, path: Path) -> ServerSecret:
    """The server secret of this database: as `load_secret`, but it makes none where the keys were made with another.

    Raises:
        InvalidSecret: as `load_secret`. SecretMismatch: the file is missing.
    """
    known = await _known_secret(database)
    # Looked for after the database was asked: whoever makes both makes the file first.
    if known is not None and not has_secret(path):
        raise SecretMismatch(
            f"{path} is missing, and this database's keys were made with it: bring it back, or set TIERLINE_SECRET to "
            "what it held; with another one every key is unknown"
        )
    return load_secret(path)


async def _known_secret(database: Database) -> str | None:
    async with database.read() as connection:
        known = await connection.scalar(select(facts.c.value).where(facts.c.name == "secret_check"))
    return None if known is None else str(known)


async def check_secret(database: Database, secret: ServerSecret) -> None:
    """Make sure that this secret is the one the database's keys were made with; the first one used is.

    Raises:
        SecretMismatch: it is another one.
    """
    mine = secret.digest("tierline secret check")
    known = await _known_secret(database)
    if known is None:
        async with database.write() as connection:
            await connection.execute(database.insert_if_absent(facts, name="secret_check", value=mine))
            known = await connection.scalar(select(facts.c.value).where(facts.c.name == "secret_check"))
    if known != mine:
        raise SecretMismatch(
            "the server secret is not the one this database's keys were made with: bring back the file 'secret' of the "
            "data directory (or TIERLINE_SECRET); with another one every key is unknown"
        )


async def check_token(database: Database, secret: ServerSecret, token: str) -> Principal:
    """Who holds a token, by the database as it is now.

    Raises:
        InvalidKey, ExpiredKey, RevokedKey: why nobody does. SecretMismatch: see there.
    """
    await check_secret(database, secret)
    store = KeyStore(database, secret)
    await store.refresh()
    return store.authenticate(token)


def read_list(text: object) -> list[str] | None:
    """The names in one of a key's columns `allowed_…`; None for all."""
    return None if text is None else msgspec.json.decode(str(text), type=list[str])


def _or(value: object, default: object) -> object:
    return default if value is None else value
