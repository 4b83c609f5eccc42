"""A real engine, one request at a time, behind a real gateway: who is served first, and what becomes of the late."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine.serving import FRANCE, MODEL, Server
from tests.gateway.front_door import POLICY, PRICE, front_door

URGENT = POLICY.replace("name: default", "name: urgent") + "applies_to: {teams: [urgent]}\npriority: -5\n"


@pytest.fixture(scope="module")
def engine(smollm2_path):
    server = Server(smollm2_path, "--max-num-seqs", "1", "--kv-cache-bytes", str(100 << 20))
    yield server.wait_ready()
    server.stop()


@pytest.fixture
async def door(tmp_path, engine):
    document = {
        "server": {"port": 0, "drain_seconds": 1},
        "models": {"tiny": {"tier": "small", "backend": "local", "upstream_model": MODEL, "price": PRICE}},
        "engines": {"e": {"model": MODEL, "port": int(engine.url.rsplit(":", 1)[1]), "autostart": False}},
        "backends": {"local": {"engine": "e"}},
        "cache": {"enabled": False},
    }
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "urgent.yaml").write_text(URGENT)
    async with front_door(tmp_path, document) as door:
        door.client.timeout = 120
        yield door


def ended(engine, reason):
    return engine.metric(f'tierline_engine_requests_total{{finish_reason="{reason}",model="{MODEL}"}}')


async def in_queue(engine, number):
    async with asyncio.timeout(60):
        while await asyncio.to_thread(engine.metric, "tierline_engine_waiting_requests") < number:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("team", ["other", "urgent"])
async def test_another_team_is_next_and_so_is_an_urgent_one(door, engine, team):
    order = []

    async def ask(name, token=None):
        answer = await door.chat("tiny", token=token, max_tokens=10, temperature=0, messages=FRANCE, ignore_eos=True)
        assert answer.status_code == 200, answer.text
        order.append(name)

    token = await door.key(team=team)
    many = [asyncio.create_task(ask(f"many {i}")) for i in range(4)]
    await in_queue(engine, 3)
    one = asyncio.create_task(ask("one", token))
    await asyncio.gather(one, *many)
    assert order.index("one") <= 2, "behind the one that ran, and at most one that ended meanwhile"


@pytest.mark.slow
async def test_who_cannot_keep_its_deadline_costs_no_step(door, engine):
    long = [{"role": "user", "content": "Read this first. " * 150}]
    learned = await door.chat("tiny", messages=long, max_tokens=2)  # what such a prompt takes here
    assert learned.status_code == 200
    before = engine.metric('tierline_engine_tokens_total{kind="prefill"')
    asked = {"max_tokens": 900, "min_tokens": 400, "messages": FRANCE}
    late = await door.chat("tiny", headers={"x-tierline-deadline-ms": "500"}, **asked)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "backend_deadline")
    assert ended(engine, "deadline") == 1
    assert engine.metric('tierline_engine_tokens_total{kind="prefill"') == before
    replica = door.services.pools["local"].replicas[0]
    assert replica.failures_total == 0, "the time was short; nothing is wrong with the server"


@pytest.mark.slow
@pytest.mark.parametrize("headers", [{}, {"x-tierline-deadline-ms": "300"}])
def test_one_that_runs_is_ended_and_told_why(engine, headers):
    field = {} if headers else {"deadline_ms": 300}
    before = ended(engine, "deadline")
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True, **field}
    text = engine.http.post("/v1/completions", json=body, headers=headers).text
    assert "[DONE]" not in text
    assert "deadline_exceeded" in text
    assert "The request's deadline passed after" in text
    assert ended(engine, "deadline") == before + 1


def test_a_deadline_must_be_a_number(engine):
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 2}
    for header in ("soon", "0", "86400001"):
        answer = engine.http.post("/v1/completions", json=body, headers={"x-tierline-deadline-ms": header})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
