"""Engines are restarted in turn, over a real supervisor: the next is asked when the one before serves again."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from gateway.rolling import CannotRestart, restart_in_turn
from tests.gateway.commands import configuration, tierline
from tests.gateway.stage import Stage, alive, run_until_up, until


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


async def restart(stage: Stage, *names: str, **options: float) -> list[tuple[str, str]]:
    told: list[tuple[str, str]] = []
    await asyncio.to_thread(
        restart_in_turn, stage.folder / "state.json", names, lambda *news: told.append(news), poll_s=0.01, **options
    )
    return told


async def test_one_after_the_other_and_others_stay(stage: Stage) -> None:
    supervisor = stage.supervisor(stage.spec("a"), stage.spec("b"), stage.spec("c"))
    running = await run_until_up(stage, supervisor)
    started = len(stage.journal())
    assert await restart(stage, "a", "b") == [("a", "stopping"), ("a", "ready"), ("b", "stopping"), ("b", "ready")]
    assert stage.journal()[started:] == ["a term", "a end", "a start", "b term", "b end", "b start"]
    state = json.loads((stage.folder / "state.json").read_text())["processes"]
    assert {name: process["restarts"] for name, process in state.items()} == {"a": 1, "b": 1, "c": 0}
    supervisor.request_stop()
    await running
    assert alive(stage.pids()) == set()


async def test_running_requests_are_waited_for(stage: Stage) -> None:
    supervisor = stage.supervisor(stage.spec("slow", "drains", stop_timeout_s=30), stage.spec("b"))
    running = await run_until_up(stage, supervisor)
    task = asyncio.create_task(restart(stage, "slow", "b"))
    await until(lambda: "slow term" in stage.journal())
    assert "b term" not in stage.journal()
    assert not task.done()
    (stage.folder / "drained").touch()
    assert (await task)[-1] == ("b", "ready")
    supervisor.request_stop()
    await running


async def test_one_that_does_not_end_in_time_leaves_the_rest_alone(stage: Stage) -> None:
    supervisor = stage.supervisor(stage.spec("stubborn", "stubborn", stop_timeout_s=0.1), stage.spec("b"))
    running = await run_until_up(stage, supervisor)
    with pytest.raises(CannotRestart, match="'stubborn' was not ready after 1 s"):
        await restart(stage, "stubborn", "b", timeout_s=1.0)
    assert "b term" not in stage.journal()
    supervisor.request_stop()
    await running
    with pytest.raises(CannotRestart, match="'tierline up' does not run here"):
        await restart(stage, "b")


async def test_what_is_not_there_is_named_before_anything_is_stopped(stage: Stage) -> None:
    supervisor = stage.supervisor(stage.spec("a"))
    running = await run_until_up(stage, supervisor)
    with pytest.raises(CannotRestart, match="'z' does not run here; these do: a"):
        await restart(stage, "a", "z")
    assert "a term" not in stage.journal()
    supervisor.request_stop()
    await running
    (stage.folder / "state.json").write_text('{"pid": 999999999, "state": "up", "processes": {}}')
    with pytest.raises(CannotRestart, match="does not run"):
        await restart(stage, "a")


def test_the_command_says_what_it_cannot_restart(tmp_path: Path) -> None:
    config = configuration(tmp_path, engine="{model: none.gguf, port: 1}")
    nothing = tierline("engine", "restart", "--config", str(config))
    assert nothing.returncode == 1
    assert "'tierline up' does not run here" in nothing.stderr
    unknown = tierline("engine", "restart", "other", "--config", str(config))
    assert unknown.returncode == 1
    assert "'other' is no engine that 'tierline up' starts" in unknown.stderr


def test_the_command_restarts_what_runs(tmp_path: Path) -> None:
    """Everything of it but the processes, which others test."""
    config = configuration(tmp_path, engine="{model: none.gguf, port: 1}")
    state = {"pid": os.getpid(), "state": "up", "processes": {"engine-e": {"status": "starting", "pid": 1}}}
    run = tmp_path / "data" / "run"
    run.mkdir(parents=True)
    (run / "up.json").write_text(json.dumps(state))
    done = tierline("engine", "restart", "--config", str(config))
    assert done.returncode == 1
    assert "'engine-e' is starting: only what serves is restarted" in done.stderr
