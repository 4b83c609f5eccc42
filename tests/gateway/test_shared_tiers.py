"""Answers of larger tiers for smaller ones: only downwards, and only where the policy chose the tier and says so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.mock_upstream import MockUpstream
from tests.gateway.cached_door import cached_door
from tests.gateway.front_door import PRICE, FrontDoor

TIERS = ("small", "medium", "large")
CHEAP = {**PRICE, "input_usd_per_million": "0.1", "output_usd_per_million": "0.2"}
MODELS = {
    "tiny": {"tier": "small", "price": CHEAP},
    "tiny-2": {"tier": "small"},
    "middle": {"tier": "medium"},
    "big": {"tier": "large"},
}
POLICY = """\
version: 1
name: default
owner: tests
routes:
  - {when: '"large=yes" in tags', tier: large}
  - {when: '"medium=yes" in tags', tier: medium}
  - {when: '"model=yes" in tags', model: tiny}
  - {tier: small}
cache: {mode: semantic, share_tiers: true}
"""
Open = Callable[..., AbstractAsyncContextManager[FrontDoor]]


@pytest.fixture
def open_door(tmp_path: Path, upstream: MockUpstream, answer_cache: Path) -> Open:
    return partial(cached_door, tmp_path, upstream, answer_cache, policy=POLICY, models=MODELS)


async def ask(door: FrontDoor, tier: str, text: str = "What is a river?", **body: Any) -> httpx.Response:
    """A question that a rule sends to the tier."""
    found = await door.chat(
        "auto", messages=[{"role": "user", "content": text}], headers={"x-tierline-tags": f"{tier}=yes"}, **body
    )
    assert found.status_code == 200, found.text
    return found


def state(answer: httpx.Response) -> tuple[str, str]:
    return answer.headers["x-tierline-cache"], answer.headers["x-tierline-model"]


@pytest.mark.parametrize("given", TIERS)
@pytest.mark.parametrize("asked", TIERS)
async def test_an_answer_goes_from_a_larger_tier_to_a_smaller_one_and_never_back(
    open_door: Open, given: str, asked: str
) -> None:
    async with open_door() as door:
        kept = await ask(door, given)
        again = await ask(door, asked)
        if TIERS.index(given) >= TIERS.index(asked):
            assert state(again) == ("exact", kept.headers["x-tierline-model"])
            assert again.json()["model"] == kept.json()["model"]
        else:
            assert again.headers["x-tierline-cache"] == "miss"
        assert again.headers.get("x-tierline-fallback") == (
            "shared_answer" if TIERS.index(given) > TIERS.index(asked) else None
        )


async def test_its_own_answer_comes_before_a_larger_models(open_door: Open) -> None:
    async with open_door() as door:
        await ask(door, "small")
        await ask(door, "large")
        assert state(await ask(door, "small")) == ("exact", "tiny")
        assert state(await ask(door, "medium")) == ("exact", "big")


async def test_other_words_find_a_larger_models_answer_too(open_door: Open) -> None:
    async with open_door() as door:
        await ask(door, "large", "What is the capital of France?")
        assert state(await ask(door, "small", "what is the capital of france")) == ("semantic", "big")
        assert state(await ask(door, "small", "Could you tell me what the capital of France is?"))[1] == "big"


async def test_who_names_a_model_or_pins_a_tier_gets_that_ones_answers_only(open_door: Open) -> None:
    async with open_door() as door:
        await ask(door, "large")
        question = [{"role": "user", "content": "What is a river?"}]
        for answer in (
            await door.chat("tiny", messages=question),
            await door.chat("tiny-2", messages=question),
            await door.chat("auto", messages=question, headers={"x-tierline-tier": "medium"}),
        ):
            assert answer.headers["x-tierline-cache"] == "miss"
        assert state(await ask(door, "model")) == ("exact", "tiny"), "nor does a rule that names a model look elsewhere"


async def test_another_model_of_the_same_tier_is_no_larger_one(open_door: Open) -> None:
    async with open_door() as door:
        await door.chat("tiny-2", messages=[{"role": "user", "content": "What is a river?"}])
        assert (await ask(door, "small")).headers["x-tierline-cache"] == "miss"


async def test_a_key_gets_no_answer_of_a_model_or_tier_that_it_may_not_use(open_door: Open) -> None:
    async with open_door() as door:
        await ask(door, "large")
        question = [{"role": "user", "content": "What is a river?"}]
        for options in ({"allowed_tiers": ["small"]}, {"allowed_models": ["tiny", "middle"]}):
            token = await door.key(**options)
            model = "auto" if "allowed_tiers" in options else "tiny"
            answer = await door.chat(model, token=token, messages=question, headers={"x-tierline-cache": "no-store"})
            assert answer.headers["x-tierline-cache"] == "miss", options


async def test_only_where_the_policy_says_so(open_door: Open) -> None:
    async with open_door(policy=POLICY.replace("share_tiers: true", "share_tiers: false")) as door:
        await ask(door, "large")
        assert (await ask(door, "small")).headers["x-tierline-cache"] == "miss"


async def test_tenants_stay_apart(open_door: Open) -> None:
    async with open_door() as door:
        await ask(door, "large")
        token = await door.key(team="other")
        answer = await door.chat("auto", token=token, messages=[{"role": "user", "content": "What is a river?"}])
        assert answer.headers["x-tierline-cache"] == "miss"
        assert (await ask(door, "small", cache_salt="mine")).headers["x-tierline-cache"] == "miss"


async def test_what_is_saved_is_what_the_own_model_would_have_cost(open_door: Open) -> None:
    async with open_door() as door:
        await ask(door, "large")
        await ask(door, "small")
        paid, free = await door.rows()
        assert (free["tier"], free["model"], free["cost_nanousd"]) == ("large", "big", 0)
        assert free["saved_nanousd"] * 10 == paid["cost_nanousd"]
