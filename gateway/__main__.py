"""`python -m gateway`: the gateway process. `tierline gateway` runs this, and so does the supervisor."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from pathlib import Path

from gateway import lifeline, logs, settings, workers
from gateway.admin.listener import listen_for_admins
from gateway.app import App
from gateway.bodies import give_memory_back
from gateway.server import Server
from gateway.services import Services
from gateway.settings import Settings
from policies.yamlfile import InvalidFile

EXIT_STOPPED = 1  # at once, without draining
EXIT_USAGE = 2
EXIT_CANNOT_START = 3


async def serve(configured: Settings, worker: int = 1) -> bool:
    """Run until SIGTERM or Ctrl-C, then drain. Returns whether the server had started."""

    async def start() -> Services:
        services = await Services.open(configured, worker=worker)
        await listen_for_admins(services)
        return services

    server = Server(App(start), configured.server)
    sockets = workers.listeners(configured, worker) if configured.server.workers > 1 else None
    # What stands now lives for ever: later collections need not look at it. A request makes hundreds of objects and
    # hardly a cycle: looking for those after every few thousand is enough.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    await server.serve(sockets)
    if server.force_exit:  # asked twice: nothing is waited for, and nothing needs it, the journal is on disk
        logging.shutdown()
        os._exit(EXIT_STOPPED)
    return server.started


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tierline gateway", description="Run the gateway process alone.")
    parser.add_argument("--config", type=Path, help="tierline.yaml; default: $TIERLINE_CONFIG or ./tierline.yaml")
    parser.add_argument("--host", help="listen on this address instead of server.host")
    parser.add_argument("--port", type=int, help="listen on this port instead of server.port")
    parser.add_argument("--worker", type=int, default=1, help="which one of server.workers this is, from 1")
    options = parser.parse_args(arguments)
    try:
        configured = settings.load(options.config)
    except InvalidFile as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    changes = {name: value for name in ("host", "port") if (value := getattr(options, name)) is not None}
    if changes:
        configured = configured.model_copy(update={"server": configured.server.model_copy(update=changes)})
    if not 1 <= options.worker <= configured.server.workers:
        parser.error(f"--worker {options.worker}: there are {configured.server.workers} (server.workers)")
    lifeline.watch()
    logs.setup(configured.server.log)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    give_memory_back()
    with asyncio.Runner(loop_factory=_uvloop) as runner:
        return 0 if runner.run(serve(configured, options.worker)) else EXIT_CANNOT_START


def _uvloop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


if __name__ == "__main__":
    sys.exit(main())
