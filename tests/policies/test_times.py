"""Policies that begin and end, and raises that hold for a while: by a clock that the test moves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from policies.check import check
from policies.load import PolicySet, Subject, load
from policies.schema.moments import moment
from policies.watch import PolicyStore
from policies.yamlfile import InvalidFile
from tests.policies.policy_files import EVERYBODY, policy, write

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def at(folder: Path, now: datetime) -> PolicySet:
    return load(folder).at(now)


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("2030-01-01T12:00:00Z", "2030-01-01T12:00:00"),
        ("2030-01-01T12:00+01:00", "2030-01-01T11:00:00"),
        ("2030-07-01 12:00 Europe/Berlin", "2030-07-01T10:00:00"),
        ("2030-01-01 12:00:30 America/New_York", "2030-01-01T17:00:30"),
    ],
)
def test_moments(text: str, utc: str) -> None:
    assert moment(text) == datetime.fromisoformat(utc).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2030-01-01", "a time and a time zone"),
        ("2030-01-01T12:00:00", "a time and a time zone"),
        ("2030-02-30T12:00:00Z", "no such moment"),
        ("2030-01-01 12:00 Europe/Atlantis", "no time zone 'Europe/Atlantis'"),
        ("2030-01-01 12:00 ../../etc/passwd", "a time and a time zone"),
        ("2030-03-31 02:30 Europe/Berlin", "put forward"),
        (1893499200, "a time and a time zone"),
    ],
)
def test_what_is_no_moment(text: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        moment(text)


def test_a_version_takes_over_on_its_date_and_gives_back(tmp_path: Path) -> None:
    later = EVERYBODY.replace("owner:", "valid_from: 2030-01-01T12:00:00Z\nvalid_until: 2030-01-01T13:00:00Z\nowner:")
    folder = write(tmp_path, a=EVERYBODY, b=later)
    first, second = (load(folder).written[i].version for i in (0, 1))

    def version(now: datetime) -> str:
        return at(folder, now).resolve(Subject()).version

    second_s = timedelta(seconds=1)
    assert version(NOON - second_s) == first
    assert version(NOON) == second
    assert version(NOON + timedelta(hours=1) - second_s) == second
    assert version(NOON + timedelta(hours=1)) == first
    assert at(folder, NOON - second_s).until == NOON
    assert at(folder, NOON + timedelta(hours=1)).until is None


def test_of_several_that_have_begun_the_last_counts(tmp_path: Path) -> None:
    versions = {
        name: EVERYBODY.replace("owner:", f"description: {name}\nvalid_from: 2030-01-0{day}T12:00:00Z\nowner:")
        for name, day in (("b", 1), ("c", 3), ("d", 2))
    }
    folder = write(tmp_path, a=EVERYBODY, **versions)

    def described(day: int) -> str | None:
        return at(folder, datetime(2030, 1, day, 13, tzinfo=UTC)).resolve(Subject()).document.description

    assert [described(day) for day in (1, 2, 3, 4)] == ["b", "d", "c", "c"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("valid_from: 2030-01-02T00:00:00Z\nvalid_until: 2030-01-01T00:00:00Z\n", "must lie after"),
        ("valid_from: 2030-01-01\n", "a time and a time zone"),
        ("raises: [{until: 2030-01-01T00:00:00Z, reason: x}]\n", "needs 'limits' or 'budget'"),
        ("raises: [{until: 2030-01-01T00:00:00Z, limits: {parallel: 3}}]\n", "missing"),
        (
            "raises: [{until: 2030-01-01T00:00:00Z, reason: x, limits: {parallel: 3}}]\n",
            "there is no 'limits.parallel'",
        ),
        (
            "limits: {parallel: 5}\nraises: [{until: 2030-01-01T00:00:00Z, reason: x, limits: {parallel: 3}}]\n",
            "so 3 is no raise",
        ),
        ("raises: [{until: 2030-01-01T00:00:00Z, reason: x, budget: {monthly_usd: 3}}]\n", "there is no 'budget"),
    ],
)
def test_faults(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(InvalidFile) as caught:
        load(write(tmp_path, a=EVERYBODY, p=policy("p", body, "{teams: [x]}")))
    assert words in caught.value.problems[0].message


@pytest.mark.parametrize(
    "lower", ["limits: {parallel: 3}", "budget: {monthly_usd: 3}", "limits: {tokens_per_minute: 3}"]
)
def test_what_is_no_raise_is_reported_where_it_stands(tmp_path: Path, lower: str) -> None:
    raises = f"raises:\n  - until: 2030-01-01T00:00:00Z\n    reason: x\n    {lower}\n"
    text = policy("p", f"limits: {{parallel: 5}}\nbudget: {{monthly_usd: 5}}\n{raises}", "{teams: [x]}")
    with pytest.raises(InvalidFile) as caught:
        load(write(tmp_path, a=EVERYBODY, p=text))
    (problem,) = caught.value.problems
    line = next(number for number, one in enumerate(text.split("\n"), 1) if lower in one)
    assert (problem.line, problem.column) == (line, 14)


def test_a_policy_that_ends_needs_another_for_everybody(tmp_path: Path) -> None:
    with pytest.raises(InvalidFile) as caught:
        load(write(tmp_path, a=EVERYBODY + "valid_until: 2030-01-01T00:00:00Z\n"))
    assert "no policy applies to everybody at all times" in caught.value.problems[0].message


def test_policies_tie_only_where_their_times_meet(tmp_path: Path) -> None:
    until = policy("one", "valid_until: 2030-01-01T00:00:00Z\n", "{teams: [x]}")
    after = policy("two", "valid_from: 2030-01-01T00:00:00Z\n", "{teams: [x]}")
    assert load(write(tmp_path, a=EVERYBODY, b=until, c=after))
    with pytest.raises(InvalidFile, match="who should win"):
        load(write(tmp_path, c=after.replace("2030", "2029")))


def test_a_raise_holds_until_its_moment(tmp_path: Path) -> None:
    body = (
        "limits: {requests_per_minute: 10, parallel: 2}\n"
        "budget: {monthly_usd: 5, when_exhausted: downgrade}\n"
        "raises:\n"
        "  - {until: 2030-01-01T12:00:00Z, reason: launch, limits: {requests_per_minute: 50},\n"
        "     budget: {monthly_usd: 9}}\n"
        "  - {until: 2030-01-01T13:00:00Z, reason: fair, limits: {requests_per_minute: 20}}\n"
    )
    folder = write(tmp_path, a=EVERYBODY, p=policy("p", body, "{teams: [x]}"))

    def there(now: datetime) -> tuple[int | None, int | None, int | None, str]:
        found = at(folder, now).named("p")
        assert found.budget is not None
        assert found.budget.when_exhausted == "downgrade"
        return found.limits.requests_per_minute, found.limits.parallel, found.budget_nanousd, found.raised

    both = "launch (until 2030-01-01 12:00:00 UTC); fair (until 2030-01-01 13:00:00 UTC)"
    assert there(NOON - timedelta(seconds=1)) == (50, 2, 9_000_000_000, both)
    assert there(NOON) == (20, 2, 5_000_000_000, "fair (until 2030-01-01 13:00:00 UTC)")
    assert there(NOON + timedelta(hours=1)) == (10, 2, 5_000_000_000, "")
    assert at(folder, NOON).named("p").version == load(folder).named("p").version


def test_the_check_names_what_is_over(tmp_path: Path) -> None:
    body = (
        "valid_until: 2020-01-01T00:00:00Z\nlimits: {parallel: 1}\n"
        "raises: [{until: 2019-01-01T00:00:00Z, reason: x, limits: {parallel: 2}}]\n"
    )
    report = check(write(tmp_path, a=EVERYBODY, p=policy("p", body, "{teams: [x]}")))
    assert report.ok
    assert report.policies == ("everybody", "p")
    assert [(w.line, w.message.split(":")[0]) for w in report.warnings] == [
        (5, "it ended on 2020-01-01 00"),
        (7, "over since 2019-01-01 00"),
    ]


def test_a_running_store_follows_the_clock(tmp_path: Path) -> None:
    now = [NOON - timedelta(seconds=1)]
    later = EVERYBODY.replace("owner:", "valid_from: 2030-01-01T12:00:00Z\nowner:")
    store = PolicyStore(write(tmp_path, a=EVERYBODY, b=later), clock=lambda: now[0])
    before = store.current
    store.turn()
    assert store.current is before, "nothing has happened, so nothing is made anew"
    now[0] = NOON
    store.turn()
    assert store.current.resolve(Subject()).version != before.resolve(Subject()).version
    now[0] = NOON - timedelta(hours=1)  # the clock was wrong and is set back
    store.turn()
    assert store.current.resolve(Subject()).version == before.resolve(Subject()).version


def test_amounts_are_exact(tmp_path: Path) -> None:
    raised = "raises: [{until: 2030-01-01T00:00:00Z, reason: x, budget: {monthly_usd: 1.000000001}}]\n"
    body = "budget: {monthly_usd: 1}\n" + raised
    found = at(write(tmp_path, a=EVERYBODY, p=policy("p", body, "{teams: [x]}")), NOON - timedelta(days=9)).named("p")
    assert found.budget is not None
    assert found.budget.monthly_usd == Decimal("1.000000001")
