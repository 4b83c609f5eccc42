"""Whatever tier is decided on: who cannot do what a request asks, or knows not its language, or would be too late, is
passed over for who can. Through a whole gateway, as clients see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.ledger import reports
from gateway.routing.pace import Paces
from tests.gateway.tiered import Tiered, tiered

CHINESE = [{"role": "user", "content": "澳大利亚的首都是哪里？"}]
ENGLISH = [{"role": "user", "content": "What is the capital of Australia?"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
LONGISH = [{"role": "user", "content": "a long story " * 500}]  # too long for the smallest, if the estimate is right
LONG = [{"role": "user", "content": "a long story " * 2000}]


def went(answer: httpx.Response) -> tuple[str, str | None, str | None]:
    """Which tier answered, which was decided on where it was another, and why it was."""
    assert answer.status_code == 200, answer.text
    headers = answer.headers
    return headers["x-tierline-tier"], headers.get("x-tierline-requested-tier"), headers.get("x-tierline-fallback")


async def test_what_the_decided_tier_cannot_do_goes_to_the_nearest_that_can(tmp_path: Path) -> None:
    models: dict[str, Any] = {
        "small": {"capabilities": [], "context_length": 1024, "max_output_tokens": 50},
        "medium": {"capabilities": ["tools"]},
        "large": {"capabilities": ["tools", "vision", "json_schema"]},
    }
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    async with tiered(tmp_path, "", models=models) as house:
        asked: list[tuple[dict[str, Any], tuple[str, str | None, str | None]]] = [
            ({}, ("small", None, None)),
            ({"tools": TOOLS}, ("medium", "small", "capability")),
            ({"messages": [{"role": "user", "content": [image]}]}, ("large", "small", "capability")),
            ({"response_format": {"type": "json_object"}}, ("large", "small", "capability")),
            ({"messages": LONG}, ("medium", "small", "context_length")),
            ({"messages": LONGISH}, ("medium", "small", "context_length")),
            ({"max_tokens": 51}, ("medium", "small", "capability")),
        ]
        for body, found in asked:
            assert went(await house.door.chat("auto", **body)) == found, body
        for model, headers in (("auto", {"x-tierline-tier": "small"}), ("s", {})):
            refused = await house.door.chat(model, headers=headers, tools=TOOLS)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_parameter")


async def test_a_larger_tier_that_is_decided_on_gives_way_to_a_smaller_one_that_can(tmp_path: Path) -> None:
    models: dict[str, Any] = {"large": {"capabilities": []}, "medium": {"capabilities": ["tools"]}}
    async with tiered(tmp_path, "", models=models, routes="routes:\n  - tier: large\n") as house:
        assert went(await house.door.chat("auto", tools=TOOLS)) == ("medium", "large", "capability")


async def test_the_owners_order_of_fallbacks_counts_before_the_nearest(tmp_path: Path) -> None:
    models: dict[str, Any] = {"small": {"capabilities": []}}
    more = 'fallback: [large, medium]\ncache: {mode: "off"}\n'
    async with tiered(tmp_path, "", models=models, more=more) as house:
        assert went(await house.door.chat("auto", tools=TOOLS)) == ("large", "small", "capability")


async def test_a_key_gets_the_models_that_it_may_use(tmp_path: Path) -> None:
    async with tiered(tmp_path, "") as house:
        token = await house.door.key(allowed_models=["m"])
        answer = await house.door.chat("auto", token=token)
        assert (answer.status_code, answer.headers["x-tierline-model"]) == (200, "m")


async def test_a_language_goes_to_who_knows_it(tmp_path: Path) -> None:
    models: dict[str, Any] = {"small": {"languages": ["en"]}, "medium": {"languages": ["en", "zh"]}}
    async with tiered(tmp_path, "", models=models) as house:
        assert went(await house.door.chat("auto", messages=ENGLISH)) == ("small", None, None)
        assert went(await house.door.chat("auto", messages=CHINESE)) == ("medium", "small", "language")
        again = [*CHINESE, {"role": "assistant", "content": "堪培拉"}, {"role": "user", "content": "OK"}]
        assert went(await house.door.chat("auto", messages=again)) == ("medium", "small", "language")
        pinned = await house.door.chat("auto", messages=CHINESE, headers={"x-tierline-tier": "small"})
        assert went(pinned) == ("small", None, None)


async def test_a_language_that_nobody_knows_is_no_reason_to_refuse(tmp_path: Path) -> None:
    only = {tier: {"languages": ["en"]} for tier in ("small", "medium", "large")}
    async with tiered(tmp_path, "", models=only) as house:
        assert went(await house.door.chat("auto", messages=CHINESE)) == ("small", None, None)


async def test_an_answer_that_fails_goes_up_only_to_who_knows_the_language(tmp_path: Path) -> None:
    models: dict[str, Any] = {"small": {"languages": ["zh"]}, "medium": {"languages": ["en"]}}
    async with tiered(tmp_path, "escalate: {when: [empty], at_most: 1}\n", models=models) as house:
        house.says("small", " ")
        answer = await house.door.chat("auto", messages=CHINESE)
        assert answer.headers["x-tierline-escalated"] == "small>large;empty"


async def test_the_language_is_a_variable_of_rules_and_on_record(tmp_path: Path) -> None:
    routes = "routes:\n  - {name: chinese, when: 'language == \"zh\"', tier: large}\n  - tier: small\n"
    async with tiered(tmp_path, "", routes=routes) as house:
        answer = await house.door.chat("auto", messages=CHINESE)
        assert went(answer) == ("large", None, None)
        found = await explained(house, answer)
        assert (found["rule"], found["features"]["language"]) == ("chinese", "zh")


async def explained(house: Tiered, answer: httpx.Response) -> dict[str, Any]:
    await house.door.services.writer.flush()
    found = await reports.explain(house.door.services.database, answer.headers["x-request-id"])
    assert found is not None
    assert found.decision is not None
    return dict(found.decision)


def known(house: Tiered, **seconds: float) -> None:
    """As if each model had lately given answers that took so long."""
    house.door.services.paces = Paces()
    for model, took in seconds.items():
        for _ in range(10):
            house.door.services.paces.answered(model, 100, took)


async def test_who_would_be_too_late_comes_after_who_would_not(tmp_path: Path) -> None:
    async with tiered(tmp_path, "", routes="routes:\n  - tier: large\n") as house:

        async def within(ms: int | None, **more: str) -> httpx.Response:
            known(house, l=20.0, m=9.0, s=0.5)
            headers = more if ms is None else {"x-tierline-deadline-ms": str(ms), **more}
            return await house.door.chat("auto", headers=headers)

        for tier in ("small", "medium", "large"):
            house.says(tier, "So.", usage={"prompt_tokens": 5, "completion_tokens": 100, "total_tokens": 105})
        for ms in (None, 60_000):
            for _ in range(5):  # the key's own answers say how long the next one will be
                assert went(await within(ms)) == ("large", None, None)
        assert went(await within(10_000)) == ("medium", "large", "deadline")
        answer = await within(3000)
        assert went(answer) == ("small", "large", "deadline")
        features = (await explained(house, answer))["features"]
        assert (features["fallback"], features["deadline_ms"]) == ("deadline", 3000)
        assert features["expected_ms"] == {"l": 20_000, "m": 9_000, "s": 500}
        assert went(await within(3000, **{"x-tierline-tier": "large"})) == ("large", None, None)
        assert went(await within(400)) == ("large", None, None), "nobody would be in time: as decided"


async def test_what_is_not_known_to_be_late_is_asked(tmp_path: Path) -> None:
    async with tiered(tmp_path, "", routes="routes:\n  - tier: large\n") as house:
        assert went(await house.door.chat("auto", headers={"x-tierline-deadline-ms": "2000"})) == ("large", None, None)


async def test_answers_teach_how_long_they_take(tmp_path: Path) -> None:
    async with tiered(tmp_path, "") as house:
        for stream in (False, True):
            for _ in range(5):
                assert (await house.door.chat("auto", stream=stream)).status_code == 200
            known_s = house.door.services.paces.seconds("s", 100)
            assert known_s is not None
            assert 0 < known_s < 5


def test_longer_answers_take_longer() -> None:
    paces = Paces()
    for tokens in (50, 100, 200, 400, 50, 100, 200, 400):
        paces.answered("m", tokens, 0.5 + 0.01 * tokens)
    assert paces.seconds("m", 1000) == pytest.approx(10.5, rel=0.02)
    assert paces.seconds("m", 10) == pytest.approx(0.6, abs=0.1)


def test_answers_of_one_length_say_nothing_about_others() -> None:
    paces = Paces()
    for _ in range(8):
        paces.answered("m", 100, 2.0)
    assert paces.seconds("m", 5000) == pytest.approx(2.0)


def test_streams_tell_when_an_answer_begins_at_least() -> None:
    paces = Paces()
    for number in range(5):
        assert paces.seconds("m", 100) is None, number
        paces.began("m", 3.0)
    assert paces.seconds("m", 100) == pytest.approx(3.0)


def test_the_latest_answers_count_and_old_ones_are_forgotten() -> None:
    now = [1000.0]
    paces = Paces(lambda: now[0])
    for _ in range(50):
        paces.answered("m", 100, 10.0)
    for _ in range(50):
        paces.answered("m", 100, 1.0)
    assert paces.seconds("m", 100) == pytest.approx(1.7, abs=0.7)
    now[0] += 601
    assert paces.seconds("m", 100) is None
    paces.answered("m", 100, 5.0)
    assert paces.seconds("m", 100) is None, "one answer is no measure"
