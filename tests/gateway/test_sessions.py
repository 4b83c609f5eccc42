"""Conversations that stay on their tier and model, through a whole gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.mock_upstream import MockUpstream
from gateway.ledger import reports
from gateway.sessions.turn import step_again
from tests.gateway.front_door import PRICE, FrontDoor, configuration, eventually, front_door

# Where a turn goes is said in its last message, so that tests decide what is wished.
POLICY = """\
version: 1
name: default
owner: tests
routes:
  - {name: now, when: 'user_text.contains("NOW")', tier: small, sticky: false}
  - {name: big, when: 'user_text.contains("BIG")', tier: large}
  - {name: named, when: 'user_text.contains("NAMED")', model: second}
  - {name: rest, tier: small}
fallback: [large, small]
session: {pin: 1h, downgrade_after: 2}
cache: {mode: "off"}
"""


def model(tier: str, backend: str = "other", context_length: int = 32_768) -> dict[str, Any]:
    described = {"tier": tier, "backend": backend, "context_length": context_length}
    return {**described, "upstream_model": "mock", "price": PRICE, "capabilities": ["tools"]}


MODELS = {"first": model("small", "up", 4096), "second": model("small"), "tall": model("large")}


@pytest.fixture
async def other() -> AsyncIterator[MockUpstream]:
    mock = MockUpstream()
    await mock.start()
    yield mock
    await mock.stop()


@pytest.fixture
async def door(tmp_path: Path, upstream: MockUpstream, other: MockUpstream) -> AsyncIterator[FrontDoor]:
    async with front_door(tmp_path, configuration({"up": upstream, "other": other}, MODELS), policy=POLICY) as running:
        yield running


def said(answer: httpx.Response) -> tuple[str | None, str | None]:
    """What became of the turn, and which model answered."""
    assert answer.status_code == 200, answer.text
    return answer.headers.get("x-tierline-session"), answer.headers.get("x-tierline-model")


async def turn(door: FrontDoor, text: str, **options: Any) -> tuple[str | None, str | None]:
    headers = {"x-tierline-session": options.pop("session", "s-1")}
    messages = [{"role": "user", "content": text}]
    return said(await door.chat("auto", messages=messages, headers=headers, **options))


async def test_a_conversation_stays_goes_up_at_once_and_comes_down_late(door: FrontDoor) -> None:
    assert await turn(door, "hello") == ("new", "first")
    assert await turn(door, "hello") == ("kept", "first")
    assert await turn(door, "BIG one") == ("upgraded", "tall")
    assert await turn(door, "hello") == ("kept", "tall")
    assert await turn(door, "BIG again") == ("kept", "tall")
    assert await turn(door, "hello") == ("kept", "tall")
    assert await turn(door, "hello") == ("downgraded", "first")
    assert await turn(door, "hello", session="s-2") == ("new", "first")
    text = (await door.client.get("/metrics")).text
    assert 'tierline_session_turns_total{outcome="kept",policy="default"} 4.0' in text


async def test_a_rule_that_is_not_sticky_and_a_named_model_leave_it_where_it_is(door: FrontDoor) -> None:
    assert await turn(door, "BIG") == ("new", "tall")
    assert await turn(door, "NOW") == ("moved", "first")
    assert await turn(door, "hello") == ("kept", "tall")
    answer = await door.chat("second", headers={"x-tierline-session": "s-1"})
    assert said(answer) == (None, "second")
    assert await turn(door, "NAMED") == ("downgraded", "second")
    assert await turn(door, "hello") == ("kept", "second")


async def test_the_headers_name_the_conversation_where_it_decided(door: FrontDoor) -> None:
    async def ask(text: str) -> str:
        messages = [{"role": "user", "content": text}]
        answer = await door.chat("auto", messages=messages, headers={"x-tierline-session": "s-1"})
        return f"{answer.headers['x-tierline-tier']} {answer.headers['x-tierline-reason']}"

    assert [await ask(text) for text in ("BIG", "BIG", "hello", "NOW")] == [
        "large rule", "large rule", "large session", "small rule",
    ]  # fmt: skip


async def test_it_is_known_by_how_it_begins(door: FrontDoor) -> None:
    async def ask(*texts: str, token: str | None = None) -> tuple[str | None, str | None]:
        roles = ("system", "user", "assistant", "user", "assistant", "user")
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        return said(await door.chat("auto", messages=messages, token=token))

    assert await ask("Be brief.", "BIG plan") == ("new", "tall")
    assert await ask("Be brief.", "BIG plan", "Ok.", "more") == ("kept", "tall")
    assert await ask("Be long.", "BIG plan", "Ok.", "more") == ("new", "first")
    assert await ask("Be brief.", "BIG plan", "Ok.", "more", token=await door.key()) == ("new", "first")
    assert await ask("Be brief.", "BIG plan") == ("new", "tall"), "an opening begins anew"


@pytest.mark.parametrize("body", [{"metadata": {"session_id": "x"}}, {"prompt_cache_key": "x"}])
async def test_the_body_may_name_it(door: FrontDoor, body: dict[str, Any]) -> None:
    def ask(text: str) -> Any:
        return door.chat("auto", messages=[{"role": "user", "content": text}], **body)

    assert said(await ask("BIG")) == ("new", "tall")
    assert said(await ask("else")) == ("kept", "tall")


async def test_responses_are_known_by_the_answer_they_go_on_from(door: FrontDoor) -> None:
    async def ask(text: str, previous: str | None = None, **more: Any) -> httpx.Response:
        body = {"model": "auto", "input": text, "previous_response_id": previous, **more}
        return await door.client.post("/v1/responses", json=body, headers=door.headers())

    first = await ask("BIG", instructions="Be brief.")
    assert said(first) == ("new", "tall")
    second = await ask("go on", first.json()["id"], instructions="Be long.")
    assert said(second) == ("kept", "tall")
    assert said(await ask("and on", second.json()["id"])) == ("downgraded", "first")
    assert said(await ask("as before", first.json()["id"])) == ("kept", "first"), "one conversation, one pin"


@pytest.mark.parametrize("bad", [b"x" * 201, b"\xe9"])
async def test_a_header_that_names_nothing_is_refused(door: FrontDoor, bad: bytes) -> None:
    headers = [(b"authorization", f"Bearer {door.token}".encode()), (b"x-tierline-session", bad)]
    body = {"model": "auto", "messages": [{"role": "user", "content": "hi"}]}
    answer = await door.client.post("/v1/chat/completions", json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_session")


async def test_it_follows_to_the_model_that_answered_and_says_so(door: FrontDoor, upstream: MockUpstream) -> None:
    assert await turn(door, "hello") == ("new", "first")
    upstream.override = "status,status=503"
    answer = await door.chat("auto", headers={"x-tierline-session": "s-1"})
    assert said(answer) == ("moved", "second")
    upstream.override = None
    assert await turn(door, "hello") == ("kept", "second"), "it does not go back to where its prompt is cached no more"
    await door.services.writer.flush()
    found = await reports.explain(door.services.database, answer.headers["x-request-id"])
    assert found is not None
    [note] = [note for note in found.notes if note["kind"] == "session"]
    assert (note["session"], note["model"]) == ("moved", "second")


async def test_a_key_that_may_not_go_up_stays_and_is_told_so(door: FrontDoor) -> None:
    token = await door.key(allowed_tiers=["small"])
    assert await turn(door, "hello", token=token) == ("new", "first")
    for _ in range(2):
        assert await turn(door, "BIG", token=token) == ("kept", "first")


async def test_a_model_that_is_too_small_for_it_is_left(door: FrontDoor) -> None:
    assert await turn(door, "hello") == ("new", "first")
    assert await turn(door, "hello " * 9000) == ("moved", "second")
    assert await turn(door, "hello") == ("kept", "second")


async def test_a_turn_can_be_decided_again_from_its_record(door: FrontDoor) -> None:
    for text in ("hello", "BIG", "hello", "hello", "NOW", "BIG"):
        answer = await door.chat(
            "auto", messages=[{"role": "user", "content": text}], headers={"x-tierline-session": "again"}
        )
        await door.services.writer.flush()
        found = await reports.explain(door.services.database, answer.headers["x-request-id"])
        assert found is not None
        assert found.decision is not None
        taken = step_again(found.decision["features"])
        assert (taken.outcome, taken.tier) == (answer.headers["x-tierline-session"], answer.headers["x-tierline-tier"])
        assert found.decision["why"].endswith(f"; session: {taken.why}")
        assert "hello" not in str(found.decision["features"]["session"])


async def test_a_policy_without_it_says_nothing(door: FrontDoor) -> None:
    door.write_policy(POLICY.replace("session: {pin: 1h, downgrade_after: 2}", "session: {pin: off}"))
    await eventually(lambda: door.services.policies.current.policies[0].document.session.pin is None)  # type: ignore[union-attr]
    assert await turn(door, "hello") == (None, "first")
    assert not len(door.services.sessions.pins)
