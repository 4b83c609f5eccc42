"""Answers that fail a check go to a larger tier: who answers, what it costs, what is on record, what never happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.ledger.reports import cost_report, explain
from tests.gateway.front_door import events
from tests.gateway.tiered import tiered

ANY = "escalate: {when: [empty, truncated, refusal, invalid_json, invalid_tool_call], at_most: 2, streams: buffer}\n"
REFUSAL = "I'm sorry, but I can't help with that."
JSON: dict[str, Any] = {"response_format": {"type": "json_object"}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def call(arguments: str, name: str = "weather") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


async def test_a_failed_check_asks_the_next_tier_and_every_step_has_its_row(tmp_path: Path) -> None:
    async with tiered(tmp_path, ANY) as house:
        house.says("small", "no JSON at all", usage={"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15})
        house.says("medium", '{"a": 1}', usage={"prompt_tokens": 10, "completion_tokens": 7, "total_tokens": 17})
        answer = await house.door.chat("auto", **JSON)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == '{"a": 1}'
        assert answer.json()["usage"]["completion_tokens"] == 7  # of the answer that is given
        assert answer.headers["x-tierline-escalated"] == "small>medium;invalid_json"
        assert (answer.headers["x-tierline-tier"], answer.headers["x-tierline-model"]) == ("medium", "m")
        assert answer.headers["x-tierline-requested-tier"] == "small"
        assert "x-tierline-fallback" not in answer.headers
        cost = (10 * 1 + 5 * 10) + (10 * 2 + 7 * 20)  # millionths of a dollar, of both
        assert float(answer.headers["x-tierline-cost-usd"]) == pytest.approx(cost / 1e6)
        rows = await house.door.rows()
        assert [(row["attempt"], row["tier"], row["outcome"], row["cost_nanousd"]) for row in rows] == [
            (1, "small", "escalated", 60_000),
            (2, "medium", "success", 160_000),
        ]
        found = await explain(house.door.services.database, answer.headers["x-request-id"])
        assert found is not None
        (note,) = [note for note in found.notes if note["kind"] == "escalation"]
        assert (note["tier"], note["model"], note["reason"], note["next"]) == ("small", "s", "invalid_json", "medium")
        report = await cost_report(house.door.services.database, ["outcome"])
        assert report.total["requests"] == 1
        assert {row["outcome"]: row["cost_nanousd"] for row in report.rows} == {"success": 160_000, "escalated": 60_000}
        metrics = (await house.door.client.get("/metrics")).text
        assert 'tierline_escalations_total{next="medium",reason="invalid_json",tier="small"} 1.0' in metrics


FAILING: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("refusal", {"content": REFUSAL}, {}),
    ("refusal", {"content": None, "refusal": "No."}, {}),
    ("empty", {"content": "  "}, {}),
    ("empty", {"content": None}, {}),
    ("invalid_json", {"content": "[1]"}, JSON),
    (
        "invalid_json",
        {"content": '{"a": "x"}'},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"properties": {"a": {"type": "integer"}}}},
            }
        },
    ),
    ("invalid_tool_call", {"content": None, "tool_calls": [call('{"town": "Oslo"}')]}, {"tools": [TOOL]}),
    ("invalid_tool_call", {"content": None, "tool_calls": [call("{")]}, {"tools": [TOOL]}),
    ("invalid_tool_call", {"content": None, "tool_calls": [call("{}", "wether")]}, {"tools": [TOOL]}),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_fails(tmp_path: Path, stream: bool) -> None:
    async with tiered(tmp_path, ANY) as house:
        house.says("medium", '{"a": 1}')
        for reason, said, asked in FAILING:
            delta = dict(said)
            if "tool_calls" in delta:
                delta["tool_calls"] = [{"index": 0, **delta["tool_calls"][0]}]
            house.says("small", "", message={"role": "assistant", **said}, deltas=[delta])
            answer = await house.door.chat("auto", **asked, stream=stream)
            assert answer.headers["x-tierline-escalated"] == f"small>medium;{reason}", said


async def test_what_passes_is_asked_once_and_is_not_touched(tmp_path: Path) -> None:
    async with tiered(tmp_path, ANY) as house:
        passing: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"content": "Fine."}, {}),
            ({"content": "{}"}, JSON),
            ({"content": None, "tool_calls": [call('{"city": "Oslo"}')]}, {"tools": [TOOL], **JSON}),
        ]
        for said, asked in passing:
            house.says("small", "", message={"role": "assistant", **said})
            answer = await house.door.chat("auto", **asked)
            assert "x-tierline-escalated" not in answer.headers
            assert "logprobs" not in msgspec.json.decode(house.servers["small"].records[-1].body)
        assert house.asked() == {"small": len(passing), "medium": 0, "large": 0}
        assert {row["outcome"] for row in await house.door.rows()} == {"success"}


async def test_an_answer_cut_at_its_models_limit_goes_where_there_is_more_room(tmp_path: Path) -> None:
    models = {"small": {"max_output_tokens": 2}, "medium": {"max_output_tokens": 2}, "large": {"max_output_tokens": 90}}
    async with tiered(tmp_path, ANY, models=models) as house:
        house.says("small", "One two", finish_reason="length")
        answer = await house.door.chat("auto")
        assert answer.headers["x-tierline-escalated"] == "small>large;truncated"
        assert house.asked()["medium"] == 0


async def test_an_answer_cut_at_the_clients_own_limit_is_what_was_asked_for(tmp_path: Path) -> None:
    async with tiered(tmp_path, ANY, models={"medium": {"context_length": 32768}}) as house:
        house.says("small", "One two", finish_reason="length")
        answer = await house.door.chat("auto", max_tokens=2)
        assert "x-tierline-escalated" not in answer.headers
        answer = await house.door.chat("auto", max_tokens=3)  # the server stopped before it
        assert answer.headers["x-tierline-escalated"] == "small>medium;truncated"


async def test_it_goes_up_as_far_as_it_may_and_gives_what_fails_least(tmp_path: Path) -> None:
    async with tiered(tmp_path, ANY) as house:
        house.says("small", REFUSAL)
        house.says("medium", "")
        house.says("large", "")
        answer = await house.door.chat("auto")
        assert answer.json()["choices"][0]["message"]["content"] == REFUSAL
        assert answer.headers["x-tierline-escalated"] == "small>medium>large;refusal,empty,empty"
        assert answer.headers["x-tierline-tier"] == "small"
        assert [(row["tier"], row["outcome"]) for row in await house.door.rows()] == [
            ("small", "success"), ("medium", "escalated"), ("large", "escalated"),
        ]  # fmt: skip


async def test_the_last_answer_is_given_though_it_fails(tmp_path: Path) -> None:
    async with tiered(tmp_path, "escalate: {when: [refusal]}\n") as house:
        house.says("small", REFUSAL)
        house.says("medium", "I cannot help with this request.")
        answer = await house.door.chat("auto")
        assert answer.json()["choices"][0]["message"]["content"] == "I cannot help with this request."
        assert house.asked()["large"] == 0


async def test_where_nothing_passes_an_error_can_be_given_instead(tmp_path: Path) -> None:
    async with tiered(tmp_path, "escalate: {when: [refusal], otherwise: error}\n") as house:
        house.says("small", REFUSAL)
        house.says("medium", REFUSAL)
        answer = await house.door.chat("auto")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "answer_failed_checks")
        assert [row["outcome"] for row in await house.door.rows()] == ["escalated", "escalated"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["status,status=500", "status,status=400", "close", "cut,after=1"])
async def test_a_larger_tier_that_fails_leaves_the_first_answer(tmp_path: Path, fault: str, stream: bool) -> None:
    async with tiered(tmp_path, "escalate: {when: [refusal], streams: buffer}\n") as house:
        house.says("small", REFUSAL)
        house.servers["medium"].override = fault
        answer = await house.door.chat("auto", stream=stream)
        assert answer.status_code == 200
        assert answer.headers["x-tierline-escalated"] == "small;refusal"
        assert answer.headers["x-tierline-tier"] == "small"
        if stream:
            said = "".join(
                e["choices"][0]["delta"].get("content", "") for e in events(answer.text)[:-1] if e["choices"]
            )
            assert said == REFUSAL
        else:
            assert answer.json()["choices"][0]["message"]["content"] == REFUSAL
        rows = await house.door.rows()
        assert [row["tier"] for row in rows if row["outcome"] == "success"] == ["small"]
        assert [row["attempt"] for row in rows] == [1, 2]


async def test_a_tier_that_is_down_is_passed_over_where_steps_are_left(tmp_path: Path) -> None:
    async with tiered(tmp_path, ANY) as house:
        house.says("small", REFUSAL)
        await house.servers["medium"].stop()
        answer = await house.door.chat("auto")
        assert answer.headers["x-tierline-escalated"] == "small>large;refusal"


async def test_a_budget_that_covers_no_further_step_leaves_the_first_answer(tmp_path: Path) -> None:
    async with tiered(tmp_path, ANY) as house:
        house.says("small", REFUSAL)
        token = await house.door.key(budget_nanousd=2_000_000)
        answer = await house.door.chat("auto", token=token, max_tokens=90)  # medium's hold is more than twice as much
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-tierline-escalated"] == "small;refusal"
        assert house.asked() == {"small": 1, "medium": 0, "large": 0}
        found = await explain(house.door.services.database, answer.headers["x-request-id"])
        await house.door.rows()
        found = await explain(house.door.services.database, answer.headers["x-request-id"])
        assert found is not None
        assert [note["stopped_by"] for note in found.notes if note["kind"] == "escalation"] == ["budget"]


async def test_no_step_begins_that_cannot_end_before_the_deadline(tmp_path: Path) -> None:
    async with tiered(tmp_path, ANY) as house:
        house.says("small", REFUSAL)
        house.servers["small"].override = "answer,delay_ms=300"
        answer = await house.door.chat("auto", headers={"x-tierline-deadline-ms": "550"})
        assert answer.status_code == 200
        assert answer.headers["x-tierline-escalated"] == "small;refusal"
        assert house.asked()["medium"] == 0
        house.servers["small"].override = None
        house.servers["medium"].override = "hang"  # it began in time, and is given up in time
        answer = await house.door.chat("auto", headers={"x-tierline-deadline-ms": "700"})
        assert answer.headers["x-tierline-escalated"] == "small;refusal"
        assert [row["outcome"] for row in await house.door.rows()] == ["success", "success", "timeout"]


async def test_what_the_client_chose_is_never_escalated(tmp_path: Path) -> None:
    async with tiered(tmp_path, ANY) as house:
        house.says("small", REFUSAL)
        for answer in (
            await house.door.chat("auto", headers={"x-tierline-tier": "small"}),
            await house.door.chat("s"),
        ):
            assert "x-tierline-escalated" not in answer.headers
        assert house.asked() == {"small": 2, "medium": 0, "large": 0}


async def test_a_key_is_asked_no_tier_that_it_may_not_use(tmp_path: Path) -> None:
    async with tiered(tmp_path, ANY) as house:
        house.says("small", REFUSAL)
        token = await house.door.key(allowed_tiers=["small", "large"])
        answer = await house.door.chat("auto", token=token)
        assert answer.headers["x-tierline-escalated"] == "small>large;refusal"


async def test_of_several_choices_each_must_pass(tmp_path: Path) -> None:
    async with tiered(tmp_path, ANY) as house:
        two = [
            {"index": 0, "message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"},
            {"index": 1, "message": {"role": "assistant", "content": REFUSAL}, "finish_reason": "stop"},
        ]
        house.wires["small"].more = {"choices": two}
        house.wires["small"].answer = lambda record: _whole(house.wires["small"], two)  # type: ignore[method-assign]
        answer = await house.door.chat("auto", n=2)
        assert answer.headers["x-tierline-escalated"] == "small>medium;refusal"


def _whole(wire: Any, choices: list[dict[str, Any]]) -> bytes:
    from bench.mock_wire import http_answer

    body = {**wire._fields("chat.completion"), "choices": choices, "usage": wire.usage}
    return http_answer(200, msgspec.json.encode(body))


async def test_a_cascade_stops_at_the_first_answer_that_passes(tmp_path: Path) -> None:
    routes = "routes:\n  - cascade: [small, medium, large]\n"
    async with tiered(tmp_path, "", routes=routes) as house:
        house.says("small", "?")
        house.says("medium", "{}")
        for stream in (False, True):
            answer = await house.door.chat("auto", **JSON, stream=stream)
            assert answer.headers["x-tierline-escalated"] == "small>medium;invalid_json"
        assert house.asked() == {"small": 2, "medium": 2, "large": 0}


async def test_a_gateway_that_dies_between_two_steps_has_the_first_on_record(tmp_path: Path) -> None:
    """What a crash is billed by: the progress of the answer that was put by."""
    async with tiered(tmp_path, ANY) as house:
        house.says("small", REFUSAL, usage={"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15})
        house.servers["medium"].override = "hang"
        written: list[Any] = []
        append = house.door.services.journal.append

        def seen(record: Any) -> None:
            written.append(record)
            append(record)

        house.door.services.journal.append = seen  # type: ignore[method-assign]
        await house.door.chat("auto", headers={"x-tierline-deadline-ms": "400"})
        kinds = [type(record).__name__ for record in written]
        assert kinds.index("Progress") < kinds.index("Open", kinds.index("Open") + 1)
        (progress,) = [record for record in written if type(record).__name__ == "Progress"]
        assert (progress.output_tokens, progress.cost_nanousd) == (5, 60_000)


async def test_the_checks_teach_which_tier_is_good_for_what(tmp_path: Path) -> None:
    async with tiered(tmp_path, ANY, routes="routes:\n  - {when: complexity >= 0.0, tier: small}\n") as house:
        taken: list[Any] = []
        house.door.services.outcomes.take = taken.append  # type: ignore[method-assign]
        house.says("small", REFUSAL)
        await house.door.chat("auto", messages=[{"role": "user", "content": "Translate into French: good morning"}])
        assert [(outcome.source, outcome.tier, outcome.good) for outcome in taken] == [
            ("validation", "small", False),
            ("validation", "medium", True),
        ]
