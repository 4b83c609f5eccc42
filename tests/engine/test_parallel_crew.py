"""The other ranks' processes: whatever becomes of one of them, rank 0 hears why, and none is left behind."""

from __future__ import annotations

import queue
from pathlib import Path

import psutil
import pytest

from engine.config import EngineConfig
from engine.parallel.crew import Crew
from engine.parallel.layout import Layout

CONFIG = EngineConfig(model_path="m", served_name="m")


class Lost:
    """Collects what `Crew` reports."""

    def __init__(self) -> None:
        self.reasons: queue.Queue[str] = queue.Queue()

    def __call__(self, reason: str) -> None:
        self.reasons.put(reason)


def crew(
    monkeypatch: pytest.MonkeyPatch,
    behaviour: str,
    lost: Lost,
    *,
    ranks: int = 2,
    seconds: float = 60,
    silent_seconds: float = 60,
) -> Crew:
    monkeypatch.setenv("TIERLINE_TEST_RANK", behaviour)
    module = "tests.engine.parallel_faulty"
    return Crew(CONFIG, Layout(ranks), lost, module=module, start_seconds=seconds, silent_seconds=silent_seconds)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("fails", "rank 1: too little memory"),
        ("exits", "rank 1 ended with exit code 7"),
        ("dies", "rank 1 ended by signal 9"),
    ],
)
def test_a_rank_that_is_lost_is_reported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, behaviour: str, reason: str
) -> None:
    lost = Lost()
    running = crew(monkeypatch, behaviour, lost)
    assert lost.reasons.get(timeout=60) == reason
    running.end()


def test_ranks_that_do_not_load_in_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Lost()
    running = crew(monkeypatch, "hangs", lost, ranks=3, seconds=0.5)
    assert lost.reasons.get(timeout=60) == "rank 1, rank 2: not loaded within 0.5 s"
    running.end()


def test_the_end_takes_all_ranks_and_their_meeting_place_along(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Lost()
    running = crew(monkeypatch, "loads", lost)
    folder = Path(running.meeting).parent
    assert folder.stat().st_mode & 0o077 == 0
    running.end()
    running.end()
    assert [process.poll() for process in running.processes] == [-9]
    assert not folder.exists()
    assert lost.reasons.empty()


def test_a_rank_that_is_killed_later_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Lost()
    running = crew(monkeypatch, "loads", lost, ranks=3)
    running.processes[1].kill()
    assert lost.reasons.get(timeout=60) == "rank 2 ended by signal 9"
    running.end()
    assert all(process.poll() is not None for process in running.processes)


def test_a_rank_that_is_stopped_is_lost_and_one_that_only_waits_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it is there for three seconds, longer than it may be silent; then the system stops it."""
    lost = Lost()
    running = crew(monkeypatch, "falls silent", lost, silent_seconds=2)
    assert lost.reasons.get(timeout=60) == "rank 1: silent for 2 s, stopped or stuck"
    (rank,) = running.processes
    assert psutil.Process(rank.pid).status() == psutil.STATUS_STOPPED, "not before"
    running.end()
    assert rank.poll() == -9
