"""The trace of steps: phases follow each other without gaps, the file is what viewers open, and it is bounded."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.load_runner import load_runner
from engine.trace import StepTrace, trace
from engine.types import StepPlan
from tests.engine.models import row, write_model
from tests.engine.serving import Server


def events(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def test_phases_follow_each_other_and_make_up_the_step(tmp_path: Path) -> None:
    one = StepTrace()
    one.phase("ignored")  # nobody listens yet
    one.start(tmp_path / "trace.json")
    for _ in range(2):
        for name in ("queue", "forward", "post"):
            one.phase(name)
        one.end(rows=3, tokens=7)
    one.end(rows=0)  # no step is under way
    one.stop()
    one.stop()
    found = events(tmp_path / "trace.json")
    assert [event["name"] for event in found] == 2 * ["queue", "forward", "post", "step"]
    *phases, step = found[:4]
    assert step["args"] == {"rows": 3, "tokens": 7}
    assert phases[0]["ts"] == step["ts"]
    for before, after in pairwise(phases):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=0.01)
    assert sum(event["dur"] for event in phases) == pytest.approx(step["dur"], abs=0.01)


def test_a_trace_ends_at_its_bound_and_is_whole(tmp_path: Path) -> None:
    one = StepTrace()
    one.start(tmp_path / "trace.json", most_bytes=1000)
    for _ in range(50):
        one.phase("queue")
        one.end()
    assert 2 < len(events(tmp_path / "trace.json")) < 30


def test_a_runner_tells_of_its_phases(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path)
    runner = load_runner(path, precision="float32", max_model_len=64, kv_cache_bytes=4 << 20)
    trace.start(tmp_path / "trace.json")
    try:
        runner.execute(StepPlan([row([5, 6, 7], [1])]))
        trace.end(rows=1)
    finally:
        trace.stop()
    names = [event["name"] for event in events(tmp_path / "trace.json")]
    assert names == ["prepare", "forward", "meanwhile", "sample", "wait", "step"]


def test_a_served_engine_writes_its_steps(tmp_path: Path, smollm2_path: Path) -> None:
    path = tmp_path / "trace.json"
    server = Server(smollm2_path, "--trace", str(path), "--max-model-len", "256").wait_ready()
    reply = server.post("/v1/completions", prompt="One, two,", max_tokens=5)
    assert reply.status_code == 200
    assert server.stop() == 0
    steps = [event for event in events(path) if event["name"] == "step"]
    assert [step["args"]["tokens"] for step in steps][1:5] == [1] * 4
    names = {"queue", "prepare", "forward", "meanwhile", "sample", "wait", "post", "step"}
    assert {event["name"] for event in events(path)} == names


def test_a_trace_that_cannot_be_written_is_refused_at_the_start(smollm2_path: Path) -> None:
    command = [sys.executable, "-m", "engine", "--model", str(smollm2_path), "--trace", "/nowhere/trace.json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 1
    assert "--trace" in run.stderr
