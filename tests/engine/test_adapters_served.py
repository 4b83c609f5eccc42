"""Adapters over HTTP, with a real engine process: by name, in one batch, loaded and unloaded while requests run."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from engine.__main__ import main
from tests.engine.adapters import write_adapter
from tests.engine.models import write_model
from tests.engine.serving import Server

PROMPT = [17, 93, 45, 201, 88, 139] * 6
BASE = "smollm2-135m"  # what `Server` serves every model as
SHORT = ("--max-model-len", "512")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def models(folder):
    """PEFT's models by adapter; their folders are in `adapters`, the first one's beside it."""
    base = write_model(folder / "tiny.gguf")
    found = {BASE: base, "first": write_adapter(folder / "first", base, seed=1)}
    for seed, name in enumerate(("second", "third", "fourth"), 2):
        found[name] = write_adapter(folder / "adapters" / name, base, seed=seed)
    write_adapter(folder / "adapters" / "wide", base, r=17)
    write_adapter(folder / "adapters" / "absurd", base, size=1e30)  # finite, but what the model makes of it is not
    write_adapter(folder / "outside", base)
    return found


@pytest.fixture(scope="module")
def server(folder, models):
    options = ["--lora", f"first={folder / 'first'}", "--lora-dir", str(folder / "adapters"), "--max-loras", "3"]
    server = Server(folder / "tiny.gguf", *SHORT, *options).wait_ready()
    yield server
    assert server.stop() == 0


@torch.inference_mode()
def greedy(model, prompt=PROMPT, count=8) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def ask(server, name, **body) -> httpx.Response:
    asked = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | body
    return server.http.post("/v1/completions", json={"model": name, **asked})


def tokens(server, name, **body) -> list[int]:
    response = ask(server, name, **body)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == name
    return response.json()["choices"][0]["token_ids"]


def load(server, name, path, **body) -> httpx.Response:
    return server.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **body})


def unload(server, name) -> httpx.Response:
    return server.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def refusal(response, status, code):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == code
    return error["message"]


def cards(server) -> dict[str, dict]:
    return {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}


def test_an_adapter_of_the_command_line_is_served_beside_its_model(server, models):
    assert tokens(server, "first") == greedy(models["first"])
    assert tokens(server, BASE) == greedy(models[BASE])
    card = cards(server)["first"]
    assert card["parent"] == BASE
    assert card["adapter"]["rank"] == 4
    assert "parent" not in cards(server)[BASE]
    assert server.http.get("/v1/models/first").json() == card


def test_one_comes_and_goes_while_the_engine_runs(server, models, folder):
    refusal(ask(server, "second"), 404, "model_not_found")
    loaded = load(server, "second", "second")
    assert loaded.status_code == 200, loaded.text
    assert loaded.json() == cards(server)["second"]["adapter"]
    assert loaded.json()["bytes"] > 0
    assert load(server, "third", folder / "adapters" / "third").status_code == 200
    for name in ("second", "third", "first", BASE):
        assert tokens(server, name) == greedy(models[name])
    assert unload(server, "second").json() == {"id": "second", "unloaded": True}
    assert unload(server, "third").status_code == 200
    assert "'first'" in refusal(ask(server, "second"), 404, "model_not_found")
    assert set(cards(server)) == {BASE, "first"}


def test_a_name_can_get_another_adapter(server, models):
    prompt = [5, *PROMPT]  # of which nothing is cached
    full_pages = len(prompt) // 16 * 16

    def answer(name):
        body = ask(server, name, prompt=prompt).json()
        return body["choices"][0]["token_ids"], body["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert load(server, "changing", "second").status_code == 200
    assert answer("changing") == (greedy(models["second"], prompt), 0)
    assert "load_inplace" in refusal(load(server, "changing", "third"), 400, "adapter_refused")
    assert load(server, "changing", "third", load_inplace=True).status_code == 200
    assert answer("changing") == (greedy(models["third"], prompt), 0)
    assert answer("changing")[1] == full_pages
    assert unload(server, "changing").status_code == 200
    # The same content under another name, after it was gone: its pages are still good.
    refusal(load(server, "white space", "third"), 400, "invalid_value")
    assert load(server, "other-name", "third").status_code == 200
    assert answer("other-name") == (greedy(models["third"], prompt), full_pages)
    assert unload(server, "other-name").status_code == 200


def test_unloading_waits_for_requests_that_run(server, models):
    assert load(server, "busy", "fourth").status_code == 200
    started, done = threading.Event(), []

    def long_one():
        body = {"model": "busy", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"temperature": 0}, timeout=60) as answer:
            for line in answer.iter_lines():
                started.set()
                done.append(line)

    thread = threading.Thread(target=long_one)
    thread.start()
    assert started.wait(60)
    assert unload(server, "busy").status_code == 200
    thread.join(60)
    assert '"finish_reason":"length"' in "".join(done)
    assert [line for line in done if line][-1] == "data: [DONE]"
    refusal(ask(server, "busy"), 404, "model_not_found")


def test_only_so_many_at_a_time(server, models):
    before = server.metric(f'tierline_engine_adapter_loads_total{{model="{BASE}",outcome="loaded"}}')
    assert load(server, "second", "second").status_code == load(server, "third", "third").status_code == 200
    message = refusal(load(server, "fourth", "fourth"), 400, "adapter_refused")
    assert "3 adapters are loaded, as many as '--max-loras' allows" in message
    assert server.metric("tierline_engine_adapters{") == 3
    assert load(server, "third", "fourth", load_inplace=True).status_code == 200, "one goes when the other comes"
    assert tokens(server, "third") == greedy(models["fourth"])
    assert server.metric("tierline_engine_adapters{") == 3
    assert server.metric(f'tierline_engine_adapter_requests_total{{adapter="third",model="{BASE}"}}') == 1
    for name in ("second", "third"):
        assert unload(server, name).status_code == 200
    assert server.metric("tierline_engine_adapters{") == 1
    assert server.metric(f'tierline_engine_adapter_loads_total{{model="{BASE}",outcome="loaded"}}') == before + 3
    assert server.metric(f'tierline_engine_adapter_loads_total{{model="{BASE}",outcome="failed"}}') >= 1
    assert 'adapter="third"' not in server.http.get("/metrics").text


def test_what_cannot_be_loaded_is_refused_with_the_reason_and_harms_nobody(server, models, folder):
    broken = folder / "adapters" / "broken"
    shutil.copytree(folder / "adapters" / "second", broken, dirs_exist_ok=True)
    data = (broken / "adapter_model.safetensors").read_bytes()
    (broken / "adapter_model.safetensors").write_bytes(data[:-1])
    (folder / "adapters" / "link").symlink_to(folder / "outside")
    for path, text in (
        ("broken", "truncated"),
        ("absent", "no such folder"),
        ("wide", "rank 17 is above 16"),
        ("absurd", "the model computed a value that is not finite. The adapter is damaged"),
        ("link", "lies outside the folder of adapters"),
        (folder / "outside", "lies outside the folder of adapters"),
        ("../outside", "lies outside the folder of adapters"),
    ):
        assert text in refusal(load(server, "bad", path), 400, "adapter_refused")
    assert set(cards(server)) == {BASE, "first"}
    assert tokens(server, "first") == greedy(models["first"])


def test_requests_that_are_none_are_refused(server):
    http = server.http
    refusal(http.post("/v1/load_lora_adapter", json={"lora_name": BASE, "lora_path": "second"}), 400, "invalid_value")
    refusal(http.post("/v1/load_lora_adapter", json={"lora_name": "", "lora_path": "second"}), 400, "invalid_value")
    refusal(http.post("/v1/load_lora_adapter", json={"lora_name": "x", "path": "second"}), 400, "unknown_parameter")
    refusal(http.post("/v1/load_lora_adapter", content=b"{"), 400, "invalid_json")
    for seen in (
        "zero\u200bwidth",
        "right\u202eleft",
        "bell\x07",
        "nul\0",
        "soft\u00adhyphen",
        "filler\u3164",
        "sel\ufe0f",
    ):
        text = refusal(load(server, seen, "second"), 400, "invalid_value")
        assert "none that cannot be seen" in text
    for fine in ("法律-2026", "Überschrift:1", "a/b.c@d+e"):
        refusal(load(server, fine, "absent"), 400, "adapter_refused")
    refusal(unload(server, "never"), 404, "adapter_not_found")
    refusal(unload(server, BASE), 404, "adapter_not_found")
    assert http.get("/v1/load_lora_adapter").status_code == 405


def test_chats_and_token_counts_take_an_adapters_name(server):
    message = [{"role": "user", "content": "hello"}]
    answer = server.http.post("/v1/chat/completions", json={"model": "first", "messages": message, "max_tokens": 3})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "first"
    assert server.http.post("/tokenize", json={"model": "first", "prompt": "a"}).status_code == 200
    assert server.http.post("/detokenize", json={"model": "first", "tokens": [5]}).status_code == 200
    refusal(server.http.post("/tokenize", json={"model": "none", "prompt": "a"}), 404, "model_not_found")


@pytest.mark.slow  # another process is started
def test_a_new_core_has_the_adapters_of_the_old_one_but_those_that_have_changed(server, models, folder):
    for name in ("second", "third"):
        shutil.copytree(folder / "adapters" / name, folder / "adapters" / f"my-{name}", dirs_exist_ok=True)
        assert load(server, f"my-{name}", f"my-{name}").status_code == 200
    shutil.copytree(folder / "adapters" / "fourth", folder / "adapters" / "my-third", dirs_exist_ok=True)
    (core,) = [p for p in psutil.Process(server.process.pid).children() if "engine.core" in " ".join(p.cmdline())]
    core.kill()
    core.wait(10)
    while server.http.get("/health").json()["status"] != "ok":  # each probe waits in the engine, or for its start
        psutil.Process(server.process.pid).children()
    assert set(cards(server)) == {BASE, "first", "my-second"}
    assert tokens(server, "my-second") == greedy(models["second"])
    assert tokens(server, "first") == greedy(models["first"])
    assert unload(server, "my-second").status_code == 200


@pytest.mark.slow  # another process is started
def test_an_engine_that_takes_none_says_so(folder, models):
    server = Server(folder / "tiny.gguf", *SHORT).wait_ready()
    try:
        message = refusal(load(server, "x", folder / "first"), 403, "adapters_disabled")
        assert "--lora-dir" in message
        refusal(unload(server, "x"), 403, "adapters_disabled")
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--lora", "first"], "give NAME=DIR"),
        (["--lora", "a={first}", "--lora", "a={first}"], "each name once"),
        (["--lora", "tiny={first}"], "the name of the model itself"),
        (["--lora", "a=absent"], "absent: no such folder"),
        (
            ["--lora", "a={first}", "--lora", "b={first}", "--max-loras", "1"],
            "names 2 adapters, '--max-loras' allows 1",
        ),
        (["--lora-dir", "absent"], "no such folder"),
    ],
)
def test_options_that_cannot_be_served(folder, models, capsys, options, text):
    options = [option.format(first=folder / "first") for option in options]
    assert main(["--model", str(folder / "tiny.gguf"), "--served-name", "tiny", *options]) == 1
    assert text in capsys.readouterr().err


@pytest.mark.slow  # another process is started
def test_an_adapter_of_the_command_line_that_is_damaged_ends_the_start(folder, models, tmp_path, capfd):
    shutil.copytree(folder / "first", tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"\x08" + b"\0" * 7 + b'{"a":{}}')
    server = Server(folder / "tiny.gguf", *SHORT, "--lora", f"a={tmp_path / 'a'}")
    assert server.process.wait(60) == 1
    server.http.close()
    server.process.stdout.close()
    assert "adapter_model.safetensors: the header of tensor 'a' is damaged" in capfd.readouterr().err
