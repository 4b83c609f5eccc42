"""The server as a process: clients that leave, a full queue, a core that is killed, wrong arguments."""

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.engine.models import write_model
from tests.engine.serving import MODEL, Server

# --- clients that leave ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_leaves_frees_its_pages(server, stream, n):
    server.wait_idle()
    before = server.metric("tierline_engine_aborts_total")
    body = {"model": MODEL, "prompt": "Tell", "max_tokens": 900, "stream": stream, "ignore_eos": True, "n": n}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        task = asyncio.create_task(first_event(http, body))
        while server.metric("tierline_engine_running") < n:
            await asyncio.sleep(0)
            server.settle()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    server.wait_idle()
    assert server.metric("tierline_engine_aborts_total") - before == n
    assert server.pages("used") == 0
    assert server.pages("free") + server.pages("cached") == server.pages("total")


async def first_event(http, body):
    """Read until cancelled."""
    if not body["stream"]:
        await http.post("/v1/completions", json=body)
        return
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            pass


async def test_64_streams_of_which_16_leave_return_all_pages(server):
    server.wait_idle()
    aborts = server.metric("tierline_engine_aborts_total")

    async def stream(http, number):
        body = {"model": MODEL, "prompt": [number + 500] * 20, "max_tokens": 12, "stream": True, "ignore_eos": True}
        body["temperature"] = 0
        if number % 4 == 0:
            body["max_tokens"] = 900  # long enough to be left in mid-answer
        events = []
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line:
                    events.append(line)
                if number % 4 == 0 and len(events) == 3:
                    return events
        return events

    limits = httpx.Limits(max_connections=80)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as http:
        streams = await asyncio.gather(*(stream(http, number) for number in range(64)))
    for number, events in enumerate(streams):
        if number % 4:
            assert events[-1] == "data: [DONE]"
            assert len(events) == 14
    server.wait_idle()
    assert server.metric("tierline_engine_aborts_total") - aborts == 16
    assert server.pages("used") == 0
    assert server.pages("free") + server.pages("cached") == server.pages("total")


# --- the process -------------------------------------------------------------------------------------------------


def test_the_http_process_has_no_torch_one_core_one_for_the_template_and_one_for_grammars(server):
    assert server.complete("x", guided_choice=["y"])["choices"][0]["text"] == "y"
    process = psutil.Process(server.process.pid)
    assert not any("libtorch" in mapping.path for mapping in process.memory_maps())
    names = [part for child in process.children(recursive=True) for part in child.cmdline() if "engine." in part]
    assert sorted(names) == ["engine.core", "engine.grammar.check_process", "engine.text.template_process"]


def test_a_full_queue_is_429_with_retry_after_and_a_killed_core_is_503(smollm2_path):
    options = ("--max-num-seqs", "1", "--max-waiting", "0", "--kv-cache-bytes", str(100 << 20))
    server = Server(smollm2_path, *options)
    try:
        starting = server.post("/v1/completions", prompt="x")
        assert (starting.status_code, starting.json()["error"]["code"]) == (503, "engine_unavailable")
        assert starting.headers["retry-after"]
        server.wait_ready()
        body = {"model": MODEL, "prompt": "Tell", "max_tokens": 900, "stream": True, "ignore_eos": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            busy = server.post("/v1/completions", prompt="x")
            assert (busy.status_code, busy.json()["error"]["code"]) == (429, "queue_full")
            assert int(busy.headers["retry-after"]) >= 1
            [core] = [c for c in psutil.Process(server.process.pid).children() if "engine.core" in c.cmdline()]
            core.kill()
            events = [line for line in lines if line]
        assert '"engine_unavailable"' in events[-1], "an error event, and no clean end"
        assert server.http.get("/health").status_code == 503
        server.wait_ready()
        assert server.complete("Hello", max_tokens=2)["usage"]["completion_tokens"] == 2
        assert server.metric("tierline_engine_core_restarts_total") == 1
    finally:
        assert server.stop() == 0


@pytest.mark.slow
def test_stopping_drains_and_tells_those_that_take_too_long(smollm2_path):
    server = Server(smollm2_path, "--kv-cache-bytes", str(100 << 20)).wait_ready()
    body = {"model": MODEL, "prompt": [5] * 100, "max_tokens": 900, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.terminate()
        events = [line for line in lines if line]
    assert server.stop() == 0
    assert events[-1] == "data: [DONE]" or "being stopped" in events[-1], "a fast machine gets it done in time"


def test_a_signal_to_all_processes_is_for_the_http_process_to_answer(tmp_path):
    """As systemd and `timeout` send it: what runs has its time to end, so nothing that it needs may end before."""
    write_model(tmp_path / "tiny.gguf")
    server = Server(tmp_path / "tiny.gguf", "--max-model-len", "512").wait_ready()
    try:
        assert server.complete("x", guided_choice=["y"])["choices"][0]["text"] == "y"  # now there is a compiler, too
        children = psutil.Process(server.process.pid).children(recursive=True)
        for child in children:
            child.terminate()
        assert server.complete("x", guided_choice=["z"])["choices"][0]["text"] == "z"
        assert len(children) == 3
        assert all(child.is_running() for child in children)
    finally:
        assert server.stop() == 0


def run_engine(*arguments):
    command = [sys.executable, "-m", "engine", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_wrong_arguments_and_models_end_with_a_message(tmp_path, smollm2_path):
    assert run_engine("--model", "x", "--port", "-1").returncode == 2
    missing = run_engine("--model", "no-such-model", "--data-dir", str(tmp_path))
    assert missing.returncode == 1
    assert "tierline models pull no-such-model" in missing.stderr
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    broken = run_engine("--model", str(tmp_path / "bad.gguf"), "--port", "0")
    assert broken.returncode == 1
    assert "bad.gguf" in broken.stderr
    bounds = run_engine("--model", str(smollm2_path), "--max-num-seqs", "64", "--max-num-batched-tokens", "8")
    assert bounds.returncode == 1
    assert "--max-num-batched-tokens (8) must be at least --max-num-seqs (64)" in bounds.stderr
    # Only the core can find this out; the server reports it and ends.
    small = run_engine("--model", str(smollm2_path), "--port", "0", "--kv-cache-bytes", "1000")
    assert small.returncode == 1
    assert "could not be loaded: one sequence of" in small.stderr
    assert "Traceback" not in small.stderr


# --- templates that never end ------------------------------------------------------------------------------------


def test_a_template_that_never_ends_holds_up_nobody_and_no_stop(tmp_path):
    """Health and other requests are answered meanwhile, and the process ends when it is told to."""
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    write_model(tmp_path / "hostile.gguf", metadata={"tokenizer.chat_template": loop + "{{ messages[0].content }}"})
    server = Server(tmp_path / "hostile.gguf", "--max-model-len", "256", "--kv-cache-bytes", str(10 << 20)).wait_ready()
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    with ThreadPoolExecutor(2) as threads:
        attack = threads.submit(server.post, "/v1/chat/completions", **body)
        for _ in range(5):
            assert server.http.get("/health").status_code == 200
            assert server.complete("x", max_tokens=1)["usage"]["completion_tokens"] == 1
        assert not attack.done()
        error = attack.result().json()["error"]
        assert (attack.result().status_code, error["code"]) == (400, "invalid_messages")
        assert "does not come to an end" in error["message"]
        threads.submit(server.post, "/v1/chat/completions", **body)
        server.http.get("/health")
        server.process.terminate()
        assert server.process.wait(30) == 0
    server.http.close()
    server.process.stdout.close()


def test_a_template_that_cannot_be_compiled_is_named_at_the_start(tmp_path):
    write_model(tmp_path / "bad.gguf", metadata={"tokenizer.chat_template": "{{ messages | nothing }}"})
    refused = run_engine("--model", str(tmp_path / "bad.gguf"), "--port", "0")
    assert refused.returncode == 1
    assert "chat template is broken at line 1: No filter named 'nothing'" in refused.stderr
