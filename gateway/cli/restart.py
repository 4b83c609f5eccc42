"""`tierline engine restart`: engines of a running `tierline up`, one after the other, while the rest serve."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from gateway.cli.common import ConfigOption, JsonOption, fail, settings_or_exit
from gateway.processes import autostarted, engine_process
from gateway.rolling import CannotRestart, restart_in_turn

app = typer.Typer(add_completion=False)


@app.command()
def restart(
    names: Annotated[
        list[str] | None, typer.Argument(help="Engines by their names in tierline.yaml. Default: all.", metavar="NAME")
    ] = None,
    config: ConfigOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds that each may take.", min=1)] = 900.0,
    as_json: JsonOption = False,
) -> None:
    """Restart engines that `tierline up` has started, in turn: each finishes its running requests first, and serves
    again before the next is asked. What no other engine serves is not served meanwhile. Model files are read again;
    for other settings of tierline.yaml, start `tierline up` anew."""
    settings = settings_or_exit(config)
    known = autostarted(settings)
    chosen = names or known
    if unknown := [name for name in chosen if name not in known]:
        fail(f"'{unknown[0]}' is no engine that 'tierline up' starts: {', '.join(known) or 'there are none'}.")
    if not chosen:
        fail("'tierline up' starts no engine here.")
    of_process = {engine_process(name): name for name in chosen}

    def told(process: str, what: str) -> None:
        name = of_process[process]
        print(json.dumps({"engine": name, "is": what}) if as_json else f"{name}: {what}", flush=True)

    try:
        restart_in_turn(settings.run_path("up.json"), list(of_process), told, timeout_s=timeout)
    except CannotRestart as error:
        fail(str(error))
