"""Checked answers and the answer cache: what failed is never kept, what passed is, apart from what nobody checked."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.gateway.tiered import Tiered, tiered

CHECKED = "escalate: {when: [refusal], streams: buffer}\n"
EXACT = "cache: {mode: exact}\n"
ROUTES = "routes:\n  - {when: '\"plain=1\" in tags', tier: small, escalate: {when: []}}\n  - tier: small\n"
REFUSAL = "I'm sorry, but I can't help with that."


def linked(root: Path, cache_socket: Path) -> Path:
    (root / "var" / "run").mkdir(parents=True)
    (root / "var" / "run" / "cache.sock").symlink_to(cache_socket)
    return root


async def ready(house: Tiered) -> None:
    client = house.door.services.cache
    assert client is not None
    assert await client.wait_ready(60)


async def cache_state(
    house: Tiered, stream: bool = False, tags: str = "a=b", question: str = "Hello"
) -> tuple[str, str]:
    """Whether the answer came from the cache, and who answered."""
    messages = [{"role": "user", "content": question}]
    answer = await house.door.chat(
        "auto", messages=messages, temperature=0, stream=stream, headers={"x-tierline-tags": tags}
    )
    assert answer.status_code == 200, answer.text
    return answer.headers["x-tierline-cache"], answer.headers["x-tierline-tier"]


async def test_what_a_larger_tier_answered_well_is_kept_and_what_failed_is_not(
    tmp_path: Path, answer_cache: Path
) -> None:
    settings = {"cache": {"lookup_timeout_ms": 30_000.0}}
    root = linked(tmp_path, answer_cache)
    async with tiered(root, CHECKED, routes=ROUTES, more=EXACT, settings=settings) as house:
        await ready(house)
        house.says("small", REFUSAL)
        house.says("medium", "Hello!")
        assert await cache_state(house) == ("miss", "medium")
        assert await cache_state(house) == ("exact", "medium")
        assert await cache_state(house, stream=True) == ("exact", "medium")
        # Without checks it is another request: neither sees the other's answers.
        assert await cache_state(house, tags="plain=1") == ("miss", "small")
        assert await cache_state(house, tags="plain=1") == ("exact", "small")
        assert await cache_state(house) == ("exact", "medium")
        # Nothing passes: it is given, and asked for afresh each time.
        house.says("medium", REFUSAL)
        for stream in (False, True):
            assert await cache_state(house, stream, question="Another") == ("miss", "medium")
        house.says("medium", "Here you are.")
        assert await cache_state(house, question="Another") == ("miss", "medium")
        rows = await house.door.rows()
        assert all(row["cost_nanousd"] == 0 for row in rows if row["outcome"] == "cache_hit")


async def test_who_asks_the_same_at_once_waits_for_the_answer_that_passed(tmp_path: Path, answer_cache: Path) -> None:
    settings = {"cache": {"lookup_timeout_ms": 30_000.0}}
    async with tiered(linked(tmp_path, answer_cache), CHECKED, more=EXACT, settings=settings) as house:
        await ready(house)
        house.says("small", REFUSAL)
        house.says("medium", "Hello!")
        house.servers["small"].override = "answer,delay_ms=300"
        found = await asyncio.gather(*(cache_state(house, question="At once") for _ in range(5)))
        assert sorted(found) == [("exact", "medium")] * 4 + [("miss", "medium")]
        assert house.asked() == {"small": 1, "medium": 1, "large": 0}
