"""`tierline up`: everything that one machine needs, with one command.

Order: lock the data folder, pull what is missing, check the ports, create the first key, start the processes, say
where it listens; then watch until Ctrl-C. The watching is in `gateway.supervisor`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.common import ConfigOption, Exit, config_path, fail, settings_or_exit
from gateway.cli.models import pull_with_bar
from gateway.lock import AlreadyLocked, FileLock
from gateway.models.catalog import CATALOG
from gateway.models.errors import ModelError
from gateway.models.store import ModelStore
from gateway.processes import CannotStart, autostarted, check_ports, listening_url, process_specs
from gateway.settings import Settings
from gateway.supervisor import Event, StartFailed, Supervisor

Report = Callable[[Event], None]


def up(
    config: ConfigOption = None,
    prepare_only: Annotated[
        bool, typer.Option("--prepare-only", help="Pull the models, create the first key, and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON, one a line.")] = False,
) -> None:
    """Start everything: engines, cache, gateway.

    Missing models are pulled, the first API key is created and saved in DATA_DIR/first-key, logs go to DATA_DIR/log.
    A process that falls is started again. Ctrl-C or SIGTERM finishes the running requests (server.drain_seconds) and
    stops everything; a second one stops at once.
    """
    settings = settings_or_exit(config)
    data_dir = settings.storage.data_dir
    url = listening_url(settings.server.host, settings.server.port)
    report = _print_json if as_json else Words(settings, url).print
    try:
        with FileLock(data_dir / "run" / "up.lock", note=f"process {os.getpid()}, {url}"):
            models = _models(settings, config_path(config).parent)
            if not prepare_only:
                check_ports(settings)
            key_file = _first_key(settings)
            if not prepare_only:
                specs = process_specs(settings, config_path(config), models)
                supervisor = Supervisor(
                    specs, log_dir=data_dir / "log", report=report, state_file=data_dir / "run" / "up.json"
                )
                asyncio.run(_supervise(supervisor))
    except AlreadyLocked as error:
        fail(f"Tierline is already running on {data_dir} ({error.note or 'unknown process'}): stop that one first.")
    except (ModelError, CannotStart) as error:
        fail(str(error))
    except StartFailed:
        raise typer.Exit(Exit.FAILED) from None  # the report has said why
    except OSError as error:
        fail(f"cannot use {data_dir}: {error}")
    if prepare_only:
        print(f"models and first key are in place ({key_file})", file=sys.stderr)


def _models(settings: Settings, base: Path) -> dict[str, Path]:
    """The weights of each engine to be started; catalogue models are pulled when they are missing."""
    store = ModelStore(settings.storage.data_dir)
    paths: dict[str, Path] = {}
    for name in autostarted(settings):
        model = settings.engines[name].model
        paths[name] = pull_with_bar(store, model).model.path if model in CATALOG else store.find(model, base)
    return paths


def _first_key(settings: Settings) -> Path:
    """Create the first key unless the database has keys; returns the file that holds it.

    Raises:
        CannotStart: the database or the server secret cannot be used.
    """
    from gateway.access.keys import ensure_first_key
    from gateway.access.secret import InvalidSecret
    from gateway.ledger.database import Database, DatabaseError

    data_dir = settings.storage.data_dir

    async def create() -> None:
        database = await Database.open(settings.database_url())
        try:
            await ensure_first_key(database, data_dir / "first-key")
        finally:
            await database.close()

    try:
        asyncio.run(create())
    except (DatabaseError, InvalidSecret) as error:
        raise CannotStart(str(error)) from error
    return data_dir / "first-key"


async def _supervise(supervisor: Supervisor) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup means it: the end of the terminal is not ours
            loop.add_signal_handler(number, supervisor.request_stop)
    await supervisor.run()


def _print_json(event: Event) -> None:
    print(json.dumps({"event": event.kind, "process": event.process, **(event.detail or {})}), flush=True)


class Words:
    """Events for a person at a terminal: one short line each, and what to do once everything is up."""

    def __init__(self, settings: Settings, url: str) -> None:
        self._settings = settings
        self._url = url
        self._width = 1 + max(len(name) for name in ("gateway", *(f"engine-{name}" for name in settings.engines)))

    def print(self, event: Event) -> None:
        detail = event.detail or {}
        seconds = detail.get("seconds")
        words = {
            "starting": "starting",
            "waiting": f"not ready after {seconds} s; it said: {detail.get('said') or 'nothing yet'}",
            "ready": f"ready on {detail.get('address')} ({seconds} s)",
            "exited": self._exited(detail),
            "restarting": f"starting again in {seconds} s",
            "stopping": f"stopping, at most {seconds} s; Ctrl-C again stops at once",
            "killed": f"killed: it did not stop within {seconds} s",
            "failed": f"cannot start: {detail.get('message')}",
            "stopped": "stopped",
            "up": self.up(),
        }
        name = event.process or "tierline"
        line = words[event.kind] if event.kind == "up" else f"{name:<{self._width}} {words[event.kind]}"
        print(line, file=sys.stderr if event.kind in ("exited", "failed") else sys.stdout, flush=True)

    def _exited(self, detail: dict[str, object]) -> str:
        tail = detail.get("tail")
        last = "".join(f"\n    {line}" for line in tail[-5:]) if isinstance(tail, list) else ""
        return f"ended with code {detail.get('code')}; the end of {_short(Path(str(detail.get('log'))))}:{last}"

    def up(self) -> str:
        """What to do now: the address, the first key and its file, and a line to paste."""
        data_dir = self._settings.storage.data_dir
        key_file = data_dir / "first-key"
        question = '[{"role": "user", "content": "What is the capital of France?"}]'
        body = f'{{"model": "auto", "temperature": 0, "messages": {question}}}'
        lines = ["", f"Tierline is up: {self._url}/v1", ""]
        if key_file.exists():
            lines.append(f"  first key  {key_file.read_text().strip()}   (kept in {_short(key_file)})")
        lines += [
            f"  logs       {_short(data_dir / 'log')}",
            "  stop       Ctrl-C",
            "",
            f"  curl {self._url}/v1/chat/completions \\",
            f'    -H "Authorization: Bearer $(cat {shlex.quote(_short(key_file))})" \\',
            f"    -H 'Content-Type: application/json' -d '{body}'",
            "",
        ]
        return "\n".join(lines)


def _short(path: Path) -> str:
    """The path as it can be typed from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
