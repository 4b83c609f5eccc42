"""Two real engines behind a real gateway: conversations stay where their pages are; then one engine is killed."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.engine.serving import MODEL, Server
from tests.gateway.front_door import PRICE, eventually, front_door

LONG = "Read this before you answer: rivers flow to the sea, and bridges stand where roads have to cross them. " * 12


@pytest.fixture
def engines(smollm2_path, monkeypatch):
    monkeypatch.setenv("TIERLINE_PAGE_SEED", "ab" * 32)
    servers = [Server(smollm2_path, "--kv-cache-bytes", str(100 << 20)) for _ in range(2)]
    for server in servers:
        server.wait_ready()
    yield servers
    for server in servers:
        server.http.close()
        server.process.kill()
        server.process.wait(30)
        server.process.stdout.close()


def document(engines):
    return {
        "server": {"port": 0, "drain_seconds": 1},
        "models": {"tiny": {"tier": "small", "backend": "local", "upstream_model": MODEL, "price": PRICE}},
        "backends": {
            "local": {
                "base_urls": [f"{engine.url}/v1" for engine in engines],
                "placement": {"prefix": "events", "remember_s": 0.001},
            }
        },
        "cache": {"enabled": False},
    }


@pytest.mark.slow
async def test_what_engines_tell_decides_and_an_engine_may_die(tmp_path, engines):
    async with front_door(tmp_path, document(engines)) as door:
        pool = door.services.pools["local"]
        index = pool.placer.index
        await eventually(lambda: pool.feeds.listening == 2)
        assert index.spaces == 1, "one seed, so their pages can be compared"
        turns = {name: [{"role": "system", "content": f"{name}. {LONG}"}] for name in ("one", "two")}

        async def ask(name, text):
            turns[name].append({"role": "user", "content": text})
            answer = await door.chat("tiny", messages=turns[name], max_tokens=4, temperature=0)
            assert answer.status_code == 200, answer.text
            turns[name].append(answer.json()["choices"][0]["message"] | {"refusal": None})
            return answer.json()["usage"]

        for number in range(3):
            for name in turns:
                usage = await ask(name, f"Question {number}?")
                if number:
                    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.7 * usage["prompt_tokens"]
        rows = await door.rows()
        assert index.pages > 20
        assert [row["placed"].split()[0] for row in rows[2:]] == ["prefix"] * 4
        said = [int(row["placed"].split()[1].split("/")[0]) for row in rows[2:]]
        assert all(expected > 100 for expected in said)

        home = next(e for e in engines if rows[-1]["replica"].startswith(e.url))
        os.kill(home.process.pid, signal.SIGKILL)
        await eventually(lambda: pool.feeds.listening == 1)
        await ask("two", "Are you still there?")
        rows = await door.rows()
        assert rows[-1]["outcome"] == "success"
        assert not rows[-1]["replica"].startswith(home.url)
        await asyncio.sleep(0)
        assert [replica.work for replica in pool.replicas] == [0, 0]
