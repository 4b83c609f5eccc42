"""Every fault of `make chaos` ends as it should; and the judge tells what does not."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from bench.chaos import Got, judge, rows_of, run
from bench.chaos_cases import BEFORE, CASES, HOPELESS, LEAVING, Case
from bench.mock_story import STORY


def test_every_fault_ends_as_it_should():
    results = asyncio.run(run(CASES))
    assert len(results) == len(CASES)
    assert {result.case.title: result.problems for result in results if result.problems} == {}
    assert sum(row.metric == "as_expected" for row in rows_of(results)) == len(CASES)


def test_no_two_cases_have_the_same_name():
    assert len({case.title for case in CASES}) == len(CASES)


def row(outcome: str, attempt: int, **fields: Any) -> dict[str, Any]:
    return {"outcome": outcome, "attempt": attempt, "output_tokens": 3, "cost_nanousd": 9, **fields}


WHOLE = Case("a fault", "close", ("error", "success"))
GOOD = Got(status=200, text=STORY, finish="stop", done=True, ids={"a"})
ROWS = [row("error", 1, cost_nanousd=0), row("success", 2)]


def test_a_whole_answer_is_right():
    assert judge(WHOLE, GOOD, ROWS) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"text": STORY[:-1]},
        {"text": STORY.replace(" there there", " there")},
        {"text": STORY + "."},
        {"finish": None},
        {"finish": "length"},
        {"done": False},
        {"after_done": True},
        {"error": "stream_cut"},
        {"ids": {"a", "b"}},
        {"status": 502},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_an_answer_that_is_not_whole_is_wrong(wrong):
    assert len(judge(WHOLE, dataclasses.replace(GOOD, **wrong), ROWS)) == 1


@pytest.mark.parametrize(
    "rows",
    [
        ROWS[:1],
        [*ROWS, row("success", 3)],
        [row("error", 1), row("cut", 2)],
        [row("error", 1), row("success", 1)],
        [row("error", 1), row("success", 2, cost_nanousd=0)],
    ],
    ids=["one is missing", "one too many", "another outcome", "a number twice", "nothing paid"],
)
def test_rows_that_are_not_right_are_wrong(rows):
    assert judge(WHOLE, GOOD, rows)


def test_a_broken_answer_must_say_so():
    case = next(case for case in HOPELESS if case.expect == "error event")
    rows = [row("cut", 1)]
    broken = Got(status=200, text=STORY[:10], error="stream_cut", ids={"a"})
    assert judge(case, broken, rows) == []
    for wrong in ({"error": None}, {"done": True}, {"text": "Twice"}, {"text": ""}):
        assert judge(case, dataclasses.replace(broken, **wrong), rows), wrong


def test_retry_after_is_looked_at():
    case = next(case for case in HOPELESS if case.status == 429)
    refused = Got(status=429, error="backend_rate_limited", retry_after="30")
    rows = [row("error", 1)]
    assert judge(case, refused, rows) == []
    for value in (None, "1", "60"):
        assert judge(case, dataclasses.replace(refused, retry_after=value), rows)


def test_a_server_must_learn_soon_that_a_client_has_left():
    rows = [row("cancelled", 1)]
    assert judge(LEAVING[0], Got(noticed_s=0.1), rows) == []
    assert judge(LEAVING[0], Got(noticed_s=1.5), rows)
    assert judge(LEAVING[0], Got(), rows)


def test_silent_faults_have_short_deadlines_and_others_long_ones():
    for case in BEFORE:
        assert (case.timeouts["first_token_s"] < 1) == case.silent
