"""The engine's benchmark: its time budget, and one real run against a tiny model, with its report."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType

from bench import engine as bench
from bench import engine_peers, transformers_peer
from tests.engine.models import write_model


class Clock:
    """A `time` that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(bench, "time", clock)
    return clock


def spend(clock: Clock, budget: bench.Budget, streams: int, seconds: float, most: int = 3) -> int:
    """How many runs of `seconds` the budget allows."""
    done = 0
    for _ in budget.runs("tierline", streams, most):
        clock.now += seconds
        done += 1
    return done


def test_runs_end_within_the_budget(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    budget = bench.Budget(100)
    assert spend(clock, budget, 1, 2) == 3  # 6 s
    assert spend(clock, budget, 8, 10) == 3  # 36 s
    assert spend(clock, budget, 32, 30) == 2  # the first may take 40, the second 30, the third would end after 126 s
    assert clock.now == 196
    assert capsys.readouterr().err == ""
    assert spend(clock, budget, 8, 10) == 0
    assert capsys.readouterr().err == "tierline: no time left for 8 streams\n"


def test_the_first_run_always_begins(clock: Clock) -> None:
    assert spend(clock, bench.Budget(1), 32, 500) == 1


def test_the_engine_and_its_peer_are_measured_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PROMPT_TOKENS", 8)
    monkeypatch.setattr(bench, "VOCABULARY", range(3, 300))
    for module in (bench, transformers_peer):
        monkeypatch.setattr(module, "ANSWER_TOKENS", 5)
    monkeypatch.setattr(transformers_peer, "VOCABULARY", range(3, 300))
    path = tmp_path / "tiny.gguf"
    write_model(path, encoding=GGMLQuantizationType.Q4_1)
    ours = asyncio.run(bench.measure_engine(path, ["--threads", "1"], [1, 2], 2, 600, 40))
    theirs = transformers_peer.measure(path, "float32", [1, 2], 1, 600)
    for rows, runs in ((ours, 2), (theirs, 1)):
        rates = [row for row in rows if row.metric == "tokens_per_second"]
        assert [row.setting for row in rates] == [bench.setting(1), bench.setting(2)]
        assert all(row.runs == runs and row.median > 0 for row in rates)
    assert {row.metric for row in ours} > {row.metric for row in theirs}
    alone = {
        row.metric: row for row in ours if row.metric in ("startup", "prefill_tokens_per_second", "ttft_warm_prefix")
    }
    assert len(alone) == 3
    assert all(row.median > 0 for row in alone.values())
    assert alone["ttft_warm_prefix"].setting == "in=56, cached=40"


def test_a_peer_that_cannot_be_had_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It cannot be installed, ends at once, or answers with less than was asked for: the run goes on and says why."""

    def not_installed(*_: object) -> engine_peers.Start:
        raise engine_peers.LeftOut("pip cannot install it")

    def ends(*_: object) -> engine_peers.Start:
        command = [sys.executable, "-c", "print('no such processor'); raise SystemExit(3)"]
        return engine_peers.Start(command, f"http://127.0.0.1:{engine_peers.free_port()}")

    for prepare, reason in ((not_installed, "pip cannot install it"), (ends, "exit code 3; its last words: no such")):
        monkeypatch.setattr(engine_peers, "PEERS", {"other": prepare})
        options = argparse.Namespace(installed=tmp_path, threads=1, streams=[1], runs=1, seconds=1)
        assert asyncio.run(bench.measure_other(options, "other", tmp_path)) == []
        assert reason in capsys.readouterr().err


def test_usage_is_found_where_each_server_puts_it() -> None:
    assert engine_peers.completion_tokens(b'data: {"choices":[{"text":"a"}],"usage":null}') is None
    assert engine_peers.completion_tokens(b'data: {"choices":[],"usage":{"completion_tokens":7}}') == 7
    assert engine_peers.completion_tokens(b'data: {"choices":[{"text":""}],"usage":{"completion_tokens":7}}') == 7
