"""The supervisor over real processes: none of them outlives it, however it ends, and none is told what it is told."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gateway.lifeline import LIFELINE_FD
from tests.gateway.stage import Stage, alive, run_until_up, until


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


PARENT = textwrap.dedent(
    """
    import asyncio, pathlib, sys
    sys.path.insert(0, {tests!r})
    from stage import Stage
    async def main():
        stage = Stage(pathlib.Path({folder!r}))
        one = stage.spec("one", "with_grandchild")
        supervisor = stage.supervisor(one, stage.spec("two", "stubborn", stage=1))
        asyncio.create_task(supervisor.run())
        await stage.up()
        print("up", flush=True)
        await asyncio.sleep(600)
    asyncio.run(main())
    """
)


def test_no_orphan_survives_a_killed_supervisor(stage: Stage) -> None:
    code = PARENT.format(tests=str(Path(__file__).parent), folder=str(stage.folder))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        pids = stage.pids()
        assert len(pids) == 3, "two children and a grandchild"
        assert alive(pids) == pids
        parent.kill()
        asyncio.run(until(lambda: not alive(pids)))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux")
def test_a_child_whose_parent_is_already_gone_does_not_start(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    wrong_parent = str(os.getppid())
    subprocess.run([sys.executable, "-m", "gateway.lifeline", wrong_parent, "touch", str(marker)], check=True)
    assert not marker.exists()
    subprocess.run([sys.executable, "-m", "gateway.lifeline", str(os.getpid()), "touch", str(marker)], check=True)
    assert marker.exists()


@pytest.mark.parametrize("value", [None, "987", "0"])
def test_without_the_supervisors_pipe_a_process_just_runs(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIFELINE_FD, raising=False)
    if value is not None:
        monkeypatch.setenv(LIFELINE_FD, value)
    code = "import sys; from gateway import lifeline; sys.exit(lifeline.watch())"
    assert subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, check=False).returncode == 0


async def test_ctrl_c_in_the_terminal_reaches_only_the_supervisor(stage: Stage) -> None:
    supervisor = stage.supervisor(stage.spec("serves"))
    running = await run_until_up(stage, supervisor)
    (pid,) = stage.pids()
    assert os.getpgid(pid) != os.getpgid(0)
    supervisor.request_stop()
    await running
    assert "serves interrupted" not in stage.journal()
