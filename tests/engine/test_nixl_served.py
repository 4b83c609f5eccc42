"""Two real engines that exchange pages by NIXL, from one process's memory to the other's; one of them is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import unused_port
from tests.engine.models import write_model
from tests.engine.serving import MODEL, Server

pytestmark = pytest.mark.slow
PROMPT = [7 + i % 300 for i in range(200)]  # twelve full pages of sixteen, and eight tokens
ASKED = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "temperature": 0}


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Server, str]]:
    pytest.importorskip("nixl")
    monkeypatch.setenv("TIERLINE_PAGE_SEED", "5e" * 32)
    monkeypatch.setenv("UCX_TLS", "tcp")  # as between two machines
    write_model(tmp_path / "tiny.gguf")
    address = f"nixl://127.0.0.1:{unused_port()}"
    common = ("--kv-cache-bytes", str(8 << 20), "--max-model-len", "512", "--kv-outbox-bytes", str(4 << 20))
    servers = [
        Server(tmp_path / "tiny.gguf", *common, "--role", "prefill", "--kv-listen", address),
        Server(tmp_path / "tiny.gguf", *common, "--role", "decode", "--kv-peer", address),
    ]
    for server in servers:
        server.wait_ready()
    yield servers[0], servers[1], address
    for server in servers:
        server.http.close()
        server.process.kill()
        server.process.wait(30)
        server.process.stdout.close()


def test_pages_come_by_nixl_and_are_computed_when_the_holder_is_gone(pair: tuple[Server, Server, str]) -> None:
    prefill, decode, address = pair

    def answer(prompt: list[int], salt: str, headers: dict[str, str] | None = None) -> list[int]:
        body = {"model": MODEL, "prompt": prompt, "cache_salt": salt, **ASKED}
        response = decode.http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens

    def pages(outcome: str) -> int:
        name = f'tierline_engine_kv_tier_pages_total{{model="{MODEL}",outcome="{outcome}",tier="{address}"}}'
        return int(decode.metric(name))

    def leg(prompt: list[int]) -> dict[str, str]:
        told = prefill.post("/v1/prefill/completions", prompt=prompt, cache_salt="a", **ASKED).json()
        assert told["pages_at"] == address
        return {"x-tierline-pages-from": address, "x-tierline-prefilled-tokens": str(len(prompt))}

    for first in (1, 2):  # the second one finds the connection open, if it fetches at all: this model computes as fast
        prompt = [first, *PROMPT[1:]]
        assert answer(prompt, "a", leg(prompt)) == answer(prompt, "own")
        assert pages("loaded") >= 12
    prompt = [3, *PROMPT[1:]]
    headers = leg(prompt)
    prefill.process.kill()
    prefill.process.wait(30)
    loaded = pages("loaded")
    assert answer(prompt, "a", headers) == answer(prompt, "own")
    assert (pages("loaded"), pages("refused")) == (loaded, 0)
