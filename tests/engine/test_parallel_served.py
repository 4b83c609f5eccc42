"""A real engine in two processes, over HTTP: it answers as one does, survives the loss of a rank, and leaves none."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from engine.__main__ import main
from tests.engine.serving import MODEL, Server


def ranks(server: Server) -> list[psutil.Process]:
    """The processes of the other ranks."""
    below = psutil.Process(server.process.pid).children(recursive=True)
    return [process for process in below if "engine.parallel.follower" in process.cmdline()]


@pytest.mark.slow
def test_an_engine_in_two_stages_serves_and_starts_again_when_a_rank_is_killed(smollm2_path: Path) -> None:
    options = ("--pipeline-parallel", "2", "--device", "cpu", "--kv-cache-bytes", str(100 << 20))
    server = Server(smollm2_path, *options).wait_ready()
    first = server.complete("The capital of France is", max_tokens=8)["choices"][0]["text"]
    assert "Paris" in first
    (rank,) = ranks(server)
    rank.kill()
    while (health := server.http.get("/health")).status_code == 200:
        pass
    assert "rank 1 ended by signal 9" in health.json()["detail"]
    server.wait_ready()
    assert server.complete("The capital of France is", max_tokens=8)["choices"][0]["text"] == first
    assert server.metric(f'tierline_engine_core_restarts_total{{model="{MODEL}"}}') == 1
    (rank,) = ranks(server)
    assert server.stop() == 0
    assert not rank.is_running()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fate", "reason"), [(signal.SIGKILL, "rank 1 ended by signal 9"), (signal.SIGSTOP, "rank 1: silent for 30 s")]
)
def test_a_rank_that_dies_or_hangs_in_a_step_fails_its_requests_and_all_start_anew(
    fate: signal.Signals, reason: str, smollm2_path: Path
) -> None:
    options = ("--pipeline-parallel", "2", "--device", "cpu", "--kv-cache-bytes", str(100 << 20))
    server = Server(smollm2_path, *options).wait_ready()
    (rank,) = ranks(server)
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert '"text"' in next(lines)
        rank.send_signal(fate)
        *_, last = (line for line in lines if line.startswith("data: "))
    error = json.loads(last.removeprefix("data: "))["error"]
    assert reason in error["message"]
    assert "Send the request again" in error["message"]
    health = server.http.get("/health")
    assert (health.status_code, reason in health.text) == (503, True)
    server.wait_ready()
    assert server.complete("The capital of France is", max_tokens=4)["usage"]["completion_tokens"] == 4
    (fresh,) = ranks(server)
    assert fresh.pid != rank.pid
    assert not rank.is_running()
    assert server.stop() == 0


def test_heads_that_cannot_be_divided_end_the_command(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(smollm2_path), "--tensor-parallel", "2", "--port", "0"]) == 1
    assert "9 attention heads (3 of keys and values)" in capsys.readouterr().err
    assert main(["--model", str(smollm2_path), "--tensor-parallel", "3", "--lora-dir", ".", "--port", "0"]) == 1
    assert "not with --tensor-parallel or --pipeline-parallel: adapters" in capsys.readouterr().err
