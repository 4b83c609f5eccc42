"""Reports: totals are sums of rows, groups are identities, output can be trusted by a spreadsheet."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uuid_utils
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from gateway.access.keys import create_key
from gateway.access.secret import ServerSecret
from gateway.ledger.database import Database
from gateway.ledger.reports import (
    DIMENSIONS,
    MEASURES,
    InvalidReport,
    cost_report,
    explain,
    parse_moment,
)
from gateway.ledger.rows import Decision, LedgerRow, Note, new_id

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
MS = int(NOW.timestamp() * 1000)
_names = st.sampled_from(["", "a", "b", "=cmd"])


def row(**fields: Any) -> LedgerRow:
    known = {"attempt_id": new_id(), "request_id": new_id(), "attempt": 1, "ts_ms": MS}
    return msgspec.convert({**known, **fields}, LedgerRow)


rows = st.builds(
    row,
    attempt_id=st.uuids().map(str),
    attempt=st.integers(1, 3),
    ts_ms=st.integers(MS - 3 * 86_400_000, MS + 3 * 86_400_000),
    key_id=_names, project_id=_names, team_id=_names, organisation_id=_names, policy=_names, tier=_names,
    model=_names, backend=_names, cache=st.sampled_from(["miss", "exact"]),
    outcome=st.sampled_from(["success", "error"]),
    input_tokens=st.integers(0, 10**6), cached_input_tokens=st.integers(0, 10**6), output_tokens=st.integers(0, 10**6),
    cost_nanousd=st.integers(0, 2**52), saved_nanousd=st.integers(0, 2**52),
)  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(rows, max_size=30, unique_by=lambda r: r.attempt_id),
    st.lists(st.sampled_from(DIMENSIONS), max_size=4, unique=True),
    st.integers(-4, 4),
    st.integers(-4, 4),
)
async def test_the_total_is_the_sum_of_the_rows(
    tmp_path_factory: pytest.TempPathFactory, made: list[LedgerRow], by: list[str], first: int, last: int
) -> None:
    database = await Database.open(f"sqlite:///{tmp_path_factory.mktemp('db')}/x.db")
    await database.insert_rows(made)
    since, until = NOW + timedelta(days=first), NOW + timedelta(days=last)
    report = await cost_report(database, by, since, until)
    inside = [r for r in made if since.timestamp() * 1000 <= r.ts_ms < until.timestamp() * 1000]
    for measure in MEASURES:
        if measure == "requests":
            expected = sum(r.attempt == 1 for r in inside)
        elif measure == "attempts":
            expected = len(inside)
        else:
            expected = sum(getattr(r, measure) for r in inside)
        assert report.total[measure] == expected
        assert sum(found[measure] for found in report.rows) == expected
    groups = {tuple(found[name] for name in by) for found in report.rows}
    assert len(groups) == len(report.rows)
    # In every format the figures are the same.
    assert msgspec.json.decode(report.to_json())["total"]["cost_nanousd"] == report.total["cost_nanousd"]
    lines = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert sum(int(line["cost_nanousd"]) for line in lines) == report.total["cost_nanousd"]
    await database.close()


async def test_groups_on_every_database(database: Database) -> None:
    await database.insert_rows(
        [
            row(model="m1", cost_nanousd=5, ts_ms=MS),
            row(model="m1", cost_nanousd=6, ts_ms=MS + 86_400_000),
            row(model="m2", cost_nanousd=2**61, ts_ms=MS),
            row(model="m2", cost_nanousd=2**61, ts_ms=MS, attempt=2),
        ]
    )
    report = await cost_report(database, ["day", "model"])
    found = [(r["day"], r["model"], r["cost_nanousd"], r["requests"], r["attempts"]) for r in report.rows]
    assert found == [
        ("2026-11-29", "m2", 2**62, 1, 2),
        ("2026-11-29", "m1", 5, 1, 1),
        ("2026-11-30", "m1", 6, 1, 1),
    ]
    assert report.total["cost_nanousd"] == 2**62 + 11


async def test_names_are_shown_and_identities_kept_apart(database: Database) -> None:
    secret = ServerSecret(b"s" * 32)
    owners = [("acme", "support"), ("acme", "sales"), ("globex", "support")]
    for n, (organisation, team) in enumerate(owners):
        info = (await create_key(database, secret, organisation=organisation, team=team)).info
        async with database.read() as connection:
            owner = (
                await connection.exec_driver_sql(
                    "SELECT p.team_id, p.id, k.id FROM keys k JOIN projects p ON p.id = k.project_id "
                    f"WHERE k.id = '{info.key_id}'"
                )
            ).one()
        await database.insert_rows([row(team_id=owner[0], project_id=owner[1], key_id=owner[2], cost_nanousd=n + 1)])
    await database.insert_rows([row(team_id="gone", cost_nanousd=9)])
    report = await cost_report(database, ["team"])
    costs = {r["team"]: r["cost_nanousd"] for r in report.rows}
    assert costs == {"acme/support": 1, "sales": 2, "globex/support": 3, "gone": 9}
    keys = {r["key"] for r in (await cost_report(database, ["key"])).rows}
    assert keys == {f"{o}/{t}/default/default" for o, t in owners} | {""}


async def test_explain(database: Database) -> None:
    decision = Decision(request_id="r1", ts_ms=MS, rule="long tickets", why="because", features={"tokens": 5})
    noted = [Note(id=f"n{n}", request_id="r1", ts_ms=MS + n, kind="told", data={"n": n}) for n in (2, 1)]
    attempts = [row(request_id="r1", attempt=n, tags={"a": "b"}) for n in (2, 1)]
    await database.insert_rows([*attempts, row(request_id="r2")], [decision, *noted])
    found = await explain(database, "r1")
    assert found is not None
    assert found.decision is not None
    assert found.decision["rule"] == "long tickets"
    assert [r["attempt"] for r in found.rows] == [1, 2]
    assert found.rows[0]["tags"] == {"a": "b"}
    assert found.notes == [{"ts_ms": MS + n, "kind": "told", "n": n} for n in (1, 2)]
    other = await explain(database, "r2")
    assert other is not None
    assert other.decision is None
    assert await explain(database, "nobody") is None


async def test_explain_by_the_id_of_the_answer(database: Database) -> None:
    unique = str(uuid_utils.uuid7())
    vendors = "chatcmpl-of-a-vendor"
    await database.insert_rows(
        [row(request_id="r1", answer_id=vendors), row(request_id="r1", attempt=2), row(request_id=f"req-{unique}")]
    )
    for name, request_id, attempts in (
        (vendors, "r1", 2),
        (f"chatcmpl-{unique}", f"req-{unique}", 1),
        (f"msg_{unique.replace('-', '')}", f"req-{unique}", 1),
    ):
        found = await explain(database, name)
        assert found is not None, name
        assert (found.request_id, len(found.rows)) == (request_id, attempts)
    for name in ("", "chatcmpl-", f"chatcmpl-{uuid_utils.uuid7()}", "chatcmpl-of-a-vendor2"):
        assert await explain(database, name) is None, name


async def test_answers_are_found_by_index(database: Database) -> None:
    if database.dialect != "sqlite":
        pytest.skip("PostgreSQL reads so small a table as a whole")
    asked: list[str] = []
    event.listen(database.engine.sync_engine, "before_cursor_execute", lambda *seen: asked.append(seen[2]))
    assert await explain(database, "somebody") is None
    (statement,) = (statement for statement in asked if "answer_id =" in statement)
    async with database.read() as connection:
        plan = await connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", ("somebody", 1, 0))
        assert "USING INDEX ix_ledger_answer_id" in str(plan.all())


async def test_what_nobody_can_make_is_refused(tmp_path: Path) -> None:
    database = await Database.open(f"sqlite:///{tmp_path}/x.db")
    for by in (["teem"], ["team", "team"], ["cost_nanousd; DROP TABLE ledger"]):
        with pytest.raises(InvalidReport, match="choose from"):
            await cost_report(database, by)
    await database.close()


async def test_a_spreadsheet_does_not_run_names(tmp_path: Path) -> None:
    database = await Database.open(f"sqlite:///{tmp_path}/x.db")
    await database.insert_rows([row(model="=HYPERLINK(1)", cost_nanousd=5)])
    report = await cost_report(database, ["model"])
    assert "\n'=HYPERLINK(1)," in report.to_csv()
    assert report.rows[0]["model"] == "=HYPERLINK(1)"
    await database.close()


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-11-01", datetime(2026, 11, 1, tzinfo=UTC)),
        ("2026-11-01T10:30", datetime(2026, 11, 1, 10, 30, tzinfo=UTC)),
        ("2026-11-01T10:30+02:00", datetime(2026, 11, 1, 8, 30, tzinfo=UTC)),
        ("7d", NOW - timedelta(days=7)),
        ("90m", NOW - timedelta(minutes=90)),
        ("2w", NOW - timedelta(weeks=2)),
    ],
)
def test_moments(text: str, moment: datetime) -> None:
    assert parse_moment(text, NOW) == moment


@pytest.mark.parametrize("text", ["", "yesterday", "d", "-3d", "2026-13-01", "99999999w"])
def test_unreadable_moments(text: str) -> None:
    with pytest.raises(InvalidReport):
        parse_moment(text, NOW)
