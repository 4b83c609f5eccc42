"""The supervisor over real processes: order, restarts, drain, logs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from gateway.child import ProcessSpec, socket_probe
from gateway.supervisor import Event, StartFailed, Timing
from tests.gateway.stage import Stage, alive, run_until_up, until


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


async def test_a_stage_starts_when_the_one_before_is_ready_and_stops_in_reverse(stage: Stage) -> None:
    front, back, side = stage.spec("front", stage=1), stage.spec("back"), stage.spec("side")
    supervisor = stage.supervisor(front, back, side)
    running = await run_until_up(stage, supervisor)
    kinds = [(event.kind, event.process) for event in stage.events]
    assert max(kinds.index(("ready", "back")), kinds.index(("ready", "side"))) < kinds.index(("starting", "front"))
    state = json.loads((stage.folder / "state.json").read_text())
    assert state["state"] == "up"
    assert {p["pid"] for p in state["processes"].values()} == stage.pids()

    supervisor.request_stop()
    await running
    journal = stage.journal()
    assert journal.index("front end") < min(journal.index("back term"), journal.index("side term"))
    assert alive(stage.pids()) == set()


async def test_a_notable_line_of_the_log_is_reported(stage: Stage) -> None:
    """What a person hears of the child's `listening` is decided by its spec."""
    front, side = stage.spec("front", notable={"listening": "it listens"}.get), stage.spec("side")
    supervisor = stage.supervisor(front, side)
    running = asyncio.create_task(supervisor.run())
    said = await stage.event(lambda event: event.kind == "said")
    assert (said.process, said.detail) == ("front", {"said": "it listens"})
    supervisor.request_stop()
    await running
    assert stage.seen("said") == ["front"]


async def test_a_fallen_process_is_started_again_with_growing_pauses(stage: Stage) -> None:
    supervisor = stage.supervisor(stage.spec("falls", "falls"), stage.spec("steady", stage=1))
    running = asyncio.create_task(supervisor.run())
    await stage.event(lambda event: len(stage.seen("exited")) >= 5)
    supervisor.request_stop()
    await running
    pauses = [event.detail["seconds"] for event in stage.events if event.kind == "restarting" and event.detail]
    assert pauses[:4] == [0.02, 0.04, 0.08, 0.1]
    assert stage.journal().count("steady start") == 1, "the others are left alone"


async def test_the_pause_starts_over_after_a_stable_run(stage: Stage) -> None:
    timing = Timing(poll_s=0.01, backoff_start_s=0.02, backoff_cap_s=10, stable_s=0.0)
    supervisor = stage.supervisor(stage.spec("falls", "falls"), timing=timing)
    running = asyncio.create_task(supervisor.run())
    await stage.event(lambda event: len(stage.seen("restarting")) >= 3)
    supervisor.request_stop()
    await running
    assert {event.detail["seconds"] for event in stage.events if event.kind == "restarting" and event.detail} == {0.02}


async def test_a_process_killed_from_outside_comes_back(stage: Stage) -> None:
    supervisor = stage.supervisor(stage.spec("serves"))
    running = await run_until_up(stage, supervisor)
    again = asyncio.create_task(stage.event(lambda event: event.kind == "ready"))
    await asyncio.sleep(0)
    os.kill(next(iter(stage.pids())), signal.SIGKILL)
    await again
    exited = next(event for event in stage.events if event.kind == "exited")
    assert exited.detail is not None
    assert exited.detail["code"] == -signal.SIGKILL
    supervisor.request_stop()
    await running
    assert stage.journal().count("serves start") == 2


async def test_what_a_fallen_process_had_started_is_ended_with_it(stage: Stage) -> None:
    supervisor = stage.supervisor(stage.spec("parent", "with_grandchild"))
    running = await run_until_up(stage, supervisor)
    grandchild = {
        int(line.split()[2]) for line in (stage.folder / "journal").read_text().splitlines() if "grand" in line
    }
    assert alive(grandchild) == grandchild
    fell = asyncio.create_task(stage.event(lambda event: event.kind == "exited"))
    await asyncio.sleep(0)
    parent = json.loads((stage.folder / "state.json").read_text())["processes"]["parent"]["pid"]
    os.kill(parent, signal.SIGKILL)
    await fell
    await until(lambda: not alive(grandchild))
    supervisor.request_stop()
    await running


async def test_the_drain_is_waited_for_before_the_stage_behind_is_asked(stage: Stage) -> None:
    supervisor = stage.supervisor(stage.spec("front", "drains", stage=1, stop_timeout_s=30), stage.spec("back"))
    running = await run_until_up(stage, supervisor)
    supervisor.request_stop()
    await until(lambda: "front term" in stage.journal())
    assert "back term" not in stage.journal()
    (stage.folder / "drained").touch()
    await running
    assert stage.journal()[-4:] == ["front term", "front end", "back term", "back end"]


async def test_a_process_that_ignores_the_request_is_killed_after_its_time(stage: Stage) -> None:
    supervisor = stage.supervisor(stage.spec("deaf", "stubborn", stop_timeout_s=0.1))
    running = await run_until_up(stage, supervisor)
    supervisor.request_stop()
    await asyncio.wait_for(running, 20)
    assert stage.seen("killed") == ["deaf"]
    assert alive(stage.pids()) == set()


async def test_a_second_request_ends_everything_at_once(stage: Stage) -> None:
    supervisor = stage.supervisor(stage.spec("front", "stubborn", stage=1, stop_timeout_s=600), stage.spec("back"))
    running = await run_until_up(stage, supervisor)
    supervisor.request_stop()
    await asyncio.sleep(0)
    supervisor.request_stop()
    await asyncio.wait_for(running, 20)
    assert alive(stage.pids()) == set()


async def test_an_essential_process_that_cannot_start_ends_the_start_with_its_own_words(stage: Stage) -> None:
    supervisor = stage.supervisor(
        stage.spec("engine", "never_ready"), stage.spec("cache"), stage.spec("front", stage=1)
    )
    with pytest.raises(StartFailed, match=re.compile("engine ended with exit code 3.*no weights found", re.DOTALL)):
        await asyncio.wait_for(supervisor.run(), 30)
    assert "front start" not in stage.journal()
    assert alive(stage.pids()) == set()


async def test_one_that_is_not_essential_is_tried_again_while_the_others_serve(stage: Stage) -> None:
    supervisor = stage.supervisor(stage.spec("cache", "never_ready", essential=False), stage.spec("front", stage=1))
    running = await run_until_up(stage, supervisor)
    assert "cache" in stage.seen("restarting")
    supervisor.request_stop()
    await running


async def test_a_program_that_does_not_exist_is_named(stage: Stage) -> None:
    spec = ProcessSpec("ghost", ("/no/such/program",), socket_probe(stage.folder / "ghost"))
    with pytest.raises(StartFailed, match=re.compile("cannot run /no/such/program", re.DOTALL)):
        await asyncio.wait_for(stage.supervisor(spec).run(), 30)


async def test_a_stop_during_the_start_is_obeyed(stage: Stage) -> None:
    waiting = ProcessSpec(
        "slow", (sys.executable, "-c", "import time; time.sleep(600)"), socket_probe(stage.folder / "no")
    )
    supervisor = stage.supervisor(waiting, timing=Timing(poll_s=0.01, waiting_notice_s=0.05))
    running = asyncio.create_task(supervisor.run())
    await stage.event(lambda event: event.kind == "waiting")
    supervisor.request_stop()
    await asyncio.wait_for(running, 20)
    assert stage.seen("up") == []


async def test_one_that_is_never_ready_ends_the_start(stage: Stage) -> None:
    waiting = ProcessSpec(
        "slow", (sys.executable, "-c", "import time; time.sleep(600)"), socket_probe(stage.folder / "no")
    )
    supervisor = stage.supervisor(waiting, timing=Timing(poll_s=0.01, ready_timeout_s=0.2))
    with pytest.raises(StartFailed, match="slow was not ready"):
        await asyncio.wait_for(supervisor.run(), 20)


# --- logs, probes, lock ---


async def test_the_log_holds_every_line_with_its_time(stage: Stage) -> None:
    code = "import sys; print('a'); print('b' * 200_000); sys.stderr.write('é without newline')"
    spec = ProcessSpec("talks", (sys.executable, "-c", code), socket_probe(stage.folder / "no"))
    with pytest.raises(StartFailed):
        await stage.supervisor(spec).run()
    lines = (stage.folder / "log/talks.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", line) for line in lines)
    texts = [line.split(" ", 1)[1] for line in lines]
    assert texts[0] == "a"
    assert "".join(texts[1:-1]) == "b" * 200_000
    assert texts[-1] == "é without newline"


async def test_a_full_disk_and_a_closed_pipe_cost_lines_and_no_process(stage: Stage) -> None:
    """What is reported goes to a terminal, a pipe or a file, and the state to a disk: each may be gone or full."""
    supervisor = stage.supervisor(stage.spec("falls", "falls"), stage.spec("drains", "drains", stage=1))

    def report(event: Event) -> None:
        stage._report(event)
        raise BrokenPipeError(32, "Broken pipe")

    supervisor._report_to = report
    (stage.folder / "a file").touch()
    supervisor._state_file = stage.folder / "a file" / "state.json"
    running = asyncio.create_task(supervisor.run())
    await stage.event(lambda event: len(stage.seen("exited")) >= 3 and "drains" in stage.seen("ready"))
    supervisor.request_stop()
    await until(lambda: "drains term" in stage.journal())
    assert not running.done()
    (stage.folder / "drained").touch()
    await running
    assert stage.journal().count("drains end") == 1
    assert alive(stage.pids()) == set()


async def test_a_process_that_cannot_be_started_again_for_now_is_tried_until_it_can(stage: Stage) -> None:
    supervisor = stage.supervisor(stage.spec("falls", "falls"))
    running = await run_until_up(stage, supervisor)
    child = supervisor._keepers["falls"].child
    start, attempts = child.start, []

    async def fails() -> None:
        attempts.append(time.monotonic())
        if len(attempts) < 3:
            raise OSError(12, "Cannot allocate memory")
        await start()

    child.start = fails  # type: ignore[method-assign]
    await stage.event(lambda event: event.kind == "ready" and len(attempts) >= 3)
    supervisor.request_stop()
    await running
    assert "Cannot allocate memory" in (stage.folder / "log" / "falls.log").read_text()
