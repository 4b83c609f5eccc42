"""The classifier and the answer cache look at one vector: through a real gateway and a real cache process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.mock_upstream import MockUpstream
from cache import wire
from gateway.ledger.rows import Decision
from gateway.ledger.schema import decisions
from gateway.routing.record import decide_again
from tests.command_line import run
from tests.gateway.cached_door import SEMANTIC, cached_door
from tests.gateway.front_door import FrontDoor, configuration, front_door

AUTO = SEMANTIC.replace("{tier: small}", "{tier: auto}")
MODELS = {tier: {"tier": tier} for tier in ("small", "medium", "large", "xlarge")}
QUESTION = "Which river flows through the middle of the city of Vienna?"


async def record(door: FrontDoor, text: str, **more: Any) -> Decision:
    """What is on record of a request, which is asked now."""
    response = await door.chat("auto", messages=[{"role": "user", "content": text}], temperature=0, **more)
    assert response.status_code == 200, response.text
    await door.rows()
    async with door.services.database.read() as connection:
        made = decisions.select().where(decisions.c.request_id == response.headers["x-request-id"])
        return msgspec.json.decode((await connection.execute(made)).one().json, type=Decision)


async def embedded(door: FrontDoor) -> int:
    assert door.services.cache is not None
    return (await door.services.cache.stats()).embedded_texts


async def test_one_vector_for_the_classifier_and_the_look_up(
    tmp_path: Path, upstream: MockUpstream, answer_cache: Path
) -> None:
    async with cached_door(tmp_path, upstream, answer_cache, policy=AUTO, models=MODELS) as door:
        before = await embedded(door)
        made = await record(door, QUESTION)
        assert await embedded(door) == before + 1  # the look-up and the keeping of the answer embedded nothing
        assert made.features["embedding"] == "used"
        assert made.features["seen"]["by_vector"] == 1.0
        policy = door.services.policies.current.named("default")
        again = decide_again(policy, made.features)
        assert (again.requested_tier, again.why) == (made.tier, made.why)
        # Asked again it is routed by the same vector, which is remembered, and so finds its answer.
        response = await door.chat("auto", messages=[{"role": "user", "content": QUESTION}], temperature=0)
        assert response.headers["x-tierline-cache"] == "exact"
        assert await embedded(door) == before + 1
        assert door.services.metrics.embeddings.labels("used").value == 2


async def test_words_decide_where_there_is_no_vector_to_look_at(
    tmp_path: Path, upstream: MockUpstream, answer_cache: Path
) -> None:
    async with cached_door(tmp_path, upstream, answer_cache, policy=AUTO, models=MODELS) as door:
        digits = " ".join(str(number) for number in range(100, 350))
        long = "".join(f"The a{number}x b{number}y was c{number}z. " for number in range(80))
        for text, became in (
            (long, "words"),
            (f"What is the sum of {digits}?", "too_long"),
        ):
            made = await record(door, text, max_tokens=5)
            assert "by_vector" not in made.features["seen"]
            assert made.features["embedding"] == became
        assert door.services.metrics.embeddings.labels("used").value == 0


async def test_requests_that_need_no_classifier_are_not_embedded_for_it(
    tmp_path: Path, upstream: MockUpstream, answer_cache: Path
) -> None:
    policy = SEMANTIC.replace("semantic", "exact")
    async with cached_door(tmp_path, upstream, answer_cache, policy=policy, models=MODELS) as door:
        before = await embedded(door)
        assert "embedding" not in (await record(door, "What is the capital of Austria?")).features
        assert await embedded(door) == before


@asynccontextmanager
async def silent_cache(path: Path) -> AsyncIterator[list[wire.Request]]:
    """A cache process that is ready and answers nothing, as one that is stopped; what it was asked."""
    received: list[wire.Request] = []

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.frame(wire.Hello(0, wire.PROTOCOL_VERSION, "ready", "f", ["latin"])))
        await writer.drain()
        with suppress(asyncio.IncompleteReadError):
            while True:
                received.append(await wire.read_request(reader))

    path.parent.mkdir(parents=True)
    server = await asyncio.start_unix_server(greet, path)
    try:
        yield received
    finally:
        server.close()


async def test_a_cache_process_that_does_not_answer_costs_its_time_once_in_a_while(
    tmp_path: Path, upstream: MockUpstream
) -> None:
    models = {name: {"backend": "up", **values} for name, values in MODELS.items()}
    document = configuration({"up": upstream}, models)
    document |= {"cache": {}, "routing": {"embedding_timeout_ms": 300}}
    policy = AUTO.replace("semantic", '"off"')
    async with (
        silent_cache(tmp_path / "var" / "run" / "cache.sock") as received,
        front_door(tmp_path, document, policy=policy) as door,
    ):
        assert door.services.cache is not None
        assert await door.services.cache.wait_ready(10)
        embedding, asks = door.services.embedding, [{"role": "user", "content": QUESTION}]
        # The first one waits for its time limit, and those after it are not sent at all.
        assert [await embedding.of(asks) for _ in range(21)] == [(None, "slow")] * 21
        assert len([one for one in received if isinstance(one, wire.EmbedRequest)]) == 1
        made = await record(door, QUESTION)
        assert made.features["embedding"] == "slow"
        assert "by_vector" not in made.features["seen"]


@pytest.mark.parametrize("setting", [{"cache": {"enabled": False}}, {"routing": {"embedding_timeout_ms": 0}}])
async def test_off(tmp_path: Path, upstream: MockUpstream, setting: dict[str, Any]) -> None:
    document = configuration({"up": upstream}, {name: {"backend": "up", **values} for name, values in MODELS.items()})
    async with front_door(tmp_path, {**document, "cache": {}, **setting}, policy=AUTO) as door:
        made = await record(door, QUESTION)
        assert "embedding" not in made.features
        assert "by_vector" not in made.features["seen"]


async def test_a_cache_process_that_is_not_there(tmp_path: Path, upstream: MockUpstream) -> None:
    document = configuration({"up": upstream}, {name: {"backend": "up", **values} for name, values in MODELS.items()})
    async with front_door(tmp_path, {**document, "cache": {}}, policy=AUTO) as door:
        assert (await record(door, QUESTION)).features["embedding"] == "unavailable"


def test_explain_asks_the_cache_process_that_runs_here(tmp_path: Path, answer_cache: Path) -> None:
    (tmp_path / "tierline.yaml").write_text(
        "version: 1\nmodels: {m: {tier: small, backend: b}}\nbackends: {b: {base_urls: [http://127.0.0.1:1/v1]}}\n"
        "routing: {embedding_timeout_ms: 30000}\ncache: {lookup_timeout_ms: 30000}\n"
    )
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "default.yaml").write_text(AUTO)
    request = json.dumps({"messages": [{"role": "user", "content": QUESTION}]})

    def judged() -> Any:
        found = run(tmp_path, "policy", "explain", "--file", "-", "--json", stdin=request)
        assert found.returncode == 0, found.stderr
        return json.loads(found.stdout)["judged"]

    assert judged() == "words"
    (tmp_path / "var" / "run").mkdir(parents=True)
    (tmp_path / "var" / "run" / "cache.sock").symlink_to(answer_cache)
    assert judged() == "vector"
    text = run(tmp_path, "policy", "explain", "--file", "-", stdin=request).stdout
    assert "judged   by its words and its vector" in text
