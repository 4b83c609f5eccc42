"""`tierline up` as a user runs it: it serves, it restarts what falls, it stops cleanly, it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

from gateway.cli.events import FirstKey, Words
from gateway.settings import load
from tests.conftest import Stack, open_to_others, start_stack


def ask(stack: Stack, question: str) -> httpx.Response:
    body = {"model": "auto", "messages": [{"role": "user", "content": question}], "max_tokens": 16, "temperature": 0}
    headers = {"authorization": f"Bearer {stack.key}"}
    return httpx.post(f"{stack.base_url}/v1/chat/completions", json=body, headers=headers, timeout=60)


def test_the_first_key_opens_the_door(tierline_stack: Stack) -> None:
    answer = ask(tierline_stack, "What is the capital of France?")
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    key_file = tierline_stack.data_dir / "first-key"
    assert key_file.stat().st_mode & 0o777 == 0o600


def test_the_printed_line_works_when_pasted(tierline_stack: Stack) -> None:
    first_key = FirstKey(tierline_stack.data_dir / "first-key", tierline_stack.key)
    text = Words(load(tierline_stack.config), tierline_stack.base_url, first_key).up()
    assert tierline_stack.key not in text
    done = subprocess.run(
        ["bash", "-c", text[text.index("curl") :]], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_what_it_writes_is_its_owners_alone(tierline_stack: Stack) -> None:
    assert ask(tierline_stack, "What is the capital of France?").status_code == 200
    written = {path.name for path in tierline_stack.data_dir.rglob("*")}
    assert {"answers.db", "cache.sock", "cache.log", "engine-smollm2-135m.log", "tierline.db", "journal"} <= written
    assert open_to_others(tierline_stack.data_dir) == {}


def test_a_second_start_on_the_same_data_names_the_first(tierline_stack: Stack) -> None:
    command = [sys.executable, "-m", "gateway.cli", "up", "--config", str(tierline_stack.config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "already running" in done.stderr
    assert tierline_stack.base_url in done.stderr


def test_doctor_sees_that_it_runs(tierline_stack: Stack) -> None:
    findings = json.loads(tierline_stack.cli("doctor", "--json").stdout)["findings"]
    ports = next(finding for finding in findings if finding["check"] == "ports")
    assert (ports["status"], "is running" in ports["message"]) == ("ok", True)


def test_a_killed_cache_is_missed_by_nobody_and_comes_back(tierline_stack: Stack) -> None:
    restarts = tierline_stack.restarts_of("cache")
    os.kill(tierline_stack.pid_of("cache"), signal.SIGKILL)
    assert ask(tierline_stack, "Name a colour.").status_code == 200
    tierline_stack.wait_for_restart("cache", restarts)


def test_a_killed_gateway_comes_back_on_the_same_port(tierline_stack: Stack) -> None:
    restarts = tierline_stack.restarts_of("gateway")
    os.kill(tierline_stack.pid_of("gateway"), signal.SIGKILL)
    tierline_stack.wait_for_restart("gateway", restarts)
    assert ask(tierline_stack, "Name a fruit.").status_code == 200


def test_a_killed_supervisor_leaves_nothing_behind(tmp_path: Path, smollm2_path: Path) -> None:
    stack = start_stack(tmp_path / "one", smollm2_path, settings={"cache": {"enabled": False}})
    family = psutil.Process(stack.process.pid).children(recursive=True)
    assert len(family) >= 3, "gateway, engine and the engine's core"
    stack.process.kill()
    stack.process.wait()
    deadline = time.monotonic() + 20
    while left := [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.02)
