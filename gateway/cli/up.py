"""`tierline up`: everything that one machine needs, with one command.

Order: check the plan, lock the data folder, pull what is missing, check the ports, create the first keys, start the
processes, say where it listens; then watch until Ctrl-C. The watching is in `gateway.supervisor`, the words are in
`events.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.common import ConfigOption, Exit, config_path, fail, settings_or_exit
from gateway.cli.events import FirstKey, Words
from gateway.cli.models import pull_with_bar
from gateway.listeners import check_hosts, check_ports
from gateway.lock import AlreadyLocked, FileLock
from gateway.models.catalog import CATALOG
from gateway.models.errors import ModelError
from gateway.models.store import ModelStore
from gateway.processes import CannotStart, autostarted, check_plan, listening_url, process_specs
from gateway.settings import Settings, where
from gateway.supervisor import Event, StartFailed, Supervisor


def up(
    config: ConfigOption = None,
    prepare_only: Annotated[
        bool, typer.Option("--prepare-only", help="Pull the models, create the first key, and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON, one a line.")] = False,
) -> None:
    """Start everything: engines, cache, gateway.

    Missing models are pulled, the first keys are created and saved in DATA_DIR/first-key and DATA_DIR/admin-key, logs
    go to DATA_DIR/log. A process that falls is started again. Ctrl-C or SIGTERM finishes the running requests
    (server.drain_seconds) and stops everything; a second one stops at once.
    """
    _take_interrupts()
    settings = settings_or_exit(config, here=True)
    data_dir = settings.storage.data_dir
    url = listening_url(settings.server.host, settings.server.port)
    try:
        check_plan(settings)
        check_hosts(settings)
        with FileLock(data_dir / "run" / "up.lock", note=f"process {os.getpid()}, {url}"):
            models, drafts = _models(settings, config_path(config).parent)
            if not prepare_only:
                check_ports(settings)
            first_key = _first_key(settings)
            admin_key = _first_admin_key(settings) if settings.admin_enabled() else None
            if not prepare_only:
                report = _print_json if as_json else Words(settings, url, first_key, config, admin_key).print
                specs = process_specs(settings, config_path(config), models, drafts)
                supervisor = Supervisor(
                    specs, log_dir=data_dir / "log", report=report, state_file=data_dir / "run" / "up.json"
                )
                try:
                    asyncio.run(_supervise(supervisor))
                finally:
                    _let_go_of_output()
    except AlreadyLocked as error:
        fail(f"Tierline is already running on {data_dir} ({error.note or 'unknown process'}): stop that one first.")
    except CannotStart as error:
        place = where(config_path(config), error.key) if error.key else ""
        fail(f"{place}{error}")
    except ModelError as error:
        fail(str(error))
    except StartFailed:
        raise typer.Exit(Exit.FAILED) from None  # the report has said why
    except OSError as error:
        fail(f"cannot use {data_dir}: {error}")
    if prepare_only:
        in_place = f"models are in place; the first key {first_key.problem}"
        if first_key.token:
            in_place = f"models and first key are in place ({first_key.path})"
        print(in_place, file=sys.stderr)


def _models(settings: Settings, base: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """The weights of each engine to be started, and of the draft models; catalogue models are pulled when missing."""
    store = ModelStore(settings.storage.data_dir)

    def find(model: str) -> Path:
        return pull_with_bar(store, model).model.path if model in CATALOG else store.find(model, base)

    engines = {name: settings.engines[name] for name in autostarted(settings)}
    models = {name: find(engine.model) for name, engine in engines.items()}
    drafts = {name: find(e.draft_model) for name, e in engines.items() if e.draft_model is not None}
    return models, drafts


def _first_key(settings: Settings) -> FirstKey:
    """Create the first key unless the database has keys, and see whether it still opens the door.

    Raises:
        CannotStart: the database or the server secret cannot be used.
    """
    from gateway.access.keys import AuthenticationError, SecretMismatch, check_token, ensure_first_key, open_secret
    from gateway.access.secret import InvalidSecret
    from gateway.ledger.database import Database, DatabaseError

    path = settings.storage.data_dir / "first-key"

    async def create() -> FirstKey:
        database = await Database.open(settings.database_url())
        try:
            made = await ensure_first_key(database, path)
            token = path.read_text().strip()
            await check_token(database, await open_secret(database, path.parent / "secret"), token)
        except FileNotFoundError:
            return FirstKey(path, None, f"is not kept any more: {path} is gone")
        except AuthenticationError as error:
            return FirstKey(path, None, f"works no more: {error}")
        finally:
            await database.close()
        return FirstKey(path, token, in_full=made is not None or sys.stdout.isatty())

    try:
        return asyncio.run(create())
    except (DatabaseError, InvalidSecret, SecretMismatch) as error:
        raise CannotStart(str(error)) from error


def _first_admin_key(settings: Settings) -> Path | None:
    """Create the first key of the admin API unless the database has some; the file that holds it, if it is there.

    Raises:
        CannotStart: the database or the server secret cannot be used.
    """
    from gateway.access.admin_keys import ensure_first_admin_key
    from gateway.access.keys import SecretMismatch
    from gateway.access.secret import InvalidSecret
    from gateway.ledger.database import Database, DatabaseError

    path = settings.storage.data_dir / "admin-key"

    async def create() -> None:
        database = await Database.open(settings.database_url())
        try:
            await ensure_first_admin_key(database, path)
        finally:
            await database.close()

    try:
        asyncio.run(create())
    except (DatabaseError, InvalidSecret, SecretMismatch) as error:
        raise CannotStart(str(error)) from error
    return path if path.exists() else None


def _let_go_of_output() -> None:
    """Lines that nobody could take must not make the end look like a failure: Python would try them once more."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _take_interrupts() -> None:
    """Let SIGINT end this command, however it was started: a script's `tierline up &` begins with SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


async def _supervise(supervisor: Supervisor) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup means it: the end of the terminal is not ours.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, supervisor.request_stop)
    await supervisor.run()


def _print_json(event: Event) -> None:
    print(json.dumps({"event": event.kind, "process": event.process, **(event.detail or {})}), flush=True)
