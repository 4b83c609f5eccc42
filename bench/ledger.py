"""What keys, limits and ledger cost a request, in CPU time, beside the bare work of the kernel and of SQLite.

    python -m bench.ledger [--runs 5] [--requests 5000]

The hot path is what a request waits for: authenticate, admit, two journal records, settle. The limit beside it is the
same bytes written by `os.pwrite` alone. The background is what a stored row costs later (with its decision), beside
`sqlite3.executemany` of the same rows. CPU time of this process, not wall time: other load hardly counts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.report import Row, report
from gateway.access.counters_memory import MemoryLimiter
from gateway.access.keys import KeyLimits, create_key
from gateway.access.keystore import KeyStore
from gateway.access.limits import Admission, Scope
from gateway.access.secret import ServerSecret
from gateway.ledger.database import Database, _decision_values, _ledger_values
from gateway.ledger.journal import Journal
from gateway.ledger.records import Close, Decided, Open, encode
from gateway.ledger.rows import Decision, LedgerRow, new_id, now_ms
from gateway.ledger.writer import LedgerWriter


def make_row(n: int) -> LedgerRow:
    """A row as full as a real one."""
    return LedgerRow(
        attempt_id=new_id(),
        request_id=new_id(),
        attempt=1,
        ts_ms=now_ms(),
        key_id="01932c07-1111-7000-8000-000000000001",
        project_id="01932c07-1111-7000-8000-000000000002",
        team_id="01932c07-1111-7000-8000-000000000003",
        organisation_id="01932c07-1111-7000-8000-000000000004",
        policy="default",
        policy_version="3f2a9c1b",
        tier="small",
        requested_tier="small",
        requested_model="auto",
        model="smollm2-135m",
        backend="local",
        replica="http://127.0.0.1:8101/v1",
        input_tokens=500 + n % 100,
        price_version="laptop-2026-11@3f2a9c1b",
        stream=True,
        tags={"app": "bench"},
    )


def make_decision(row: LedgerRow) -> Decision:
    return Decision(
        request_id=row.request_id,
        ts_ms=row.ts_ms,
        policy="default",
        rule="everything else",
        why="no rule before it matched",
        tier="small",
        model="smollm2-135m",
        features={"prompt_tokens": 500, "task": "chat", "complexity": 0.31, "stream": True},
        candidates=[{"model": "smollm2-135m", "tier": "small", "backend": "local"}],
    )


def per_item_us(items: int, work: Callable[[], None], clock: Callable[[], float] = time.thread_time) -> float:
    started = clock()
    work()
    return (clock() - started) / items * 1e6


async def hot_path(directory: Path, requests: int) -> dict[str, float]:
    """Microseconds of CPU per request of each part, and of all parts together."""
    database = await Database.open(f"sqlite:///{directory}/bench.db")
    secret = ServerSecret(os.urandom(32))
    limits = KeyLimits(requests_per_minute=10**9, tokens_per_minute=2**30, parallel=10**6)
    token = (await create_key(database, secret, limits=limits, budget_nanousd=10**15)).token
    store = KeyStore(database, secret)
    await store.refresh()
    await database.close()
    journal = Journal.open(directory / "journal")
    limiter = MemoryLimiter()
    policy = Scope("policy:default", tokens_per_minute=10**12, budget_nanousd=10**15)
    scopes = (store.authenticate(token).scope(), policy)

    async def admit_and_settle() -> None:
        for n in range(requests):
            hold = f"hold-{n}"
            await limiter.admit(Admission(hold, scopes, 1000, 10_000, 900.0))
            await limiter.settle(hold, 700, 7_000)

    def authenticate() -> None:
        for _ in range(requests):
            store.authenticate(token)

    def journal_attempts() -> None:
        for n in range(requests):
            row = make_row(n)
            journal.append(Open(row))
            row.outcome, row.output_tokens, row.cost_nanousd = "success", 200, 12_345
            journal.append(Close(row))

    def make_rows() -> None:
        for n in range(requests):
            make_row(n)

    decisions = [make_decision(make_row(n)) for n in range(requests)]

    def journal_decisions() -> None:
        for decision in decisions:
            journal.append(Decided(decision))

    payloads = [encode(Close(make_row(n))) for n in range(requests)]
    descriptor = os.open(directory / "raw", os.O_WRONLY | os.O_CREAT)
    os.posix_fallocate(descriptor, 0, requests * 2 * len(payloads[0]) + 4096)

    def raw_writes() -> None:
        offset = 0
        for payload in payloads:
            offset += os.pwrite(descriptor, payload, offset)
            offset += os.pwrite(descriptor, payload, offset)

    async def whole() -> None:
        for n in range(requests):
            principal = store.authenticate(token)
            hold = f"whole-{n}"
            await limiter.admit(Admission(hold, (principal.scope(), policy), 1000, 10_000, 900.0))
            row = make_row(n)
            journal.append(Open(row))
            row.outcome, row.output_tokens, row.cost_nanousd = "success", 200, 12_345
            journal.append(Close(row))
            await limiter.settle(hold, 700, 12_345)

    started = time.thread_time()
    await admit_and_settle()
    admitted = (time.thread_time() - started) / requests * 1e6
    result = {
        "authenticate": per_item_us(requests, authenticate),
        "admit and settle": admitted,
        "two journal records": per_item_us(requests, journal_attempts) - per_item_us(requests, make_rows),
        "one decision record": per_item_us(requests, journal_decisions),
        "raw": per_item_us(requests, raw_writes),
    }
    started = time.thread_time()
    await whole()
    result["whole"] = (time.thread_time() - started) / requests * 1e6
    os.close(descriptor)
    journal.close()
    return result


async def background(directory: Path, rows: int) -> dict[str, float]:
    """Microseconds of CPU per row, all threads, from the journal to the database."""
    database = await Database.open(f"sqlite:///{directory}/bench.db")
    journal = Journal.open(directory / "journal")
    made = [make_row(n) for n in range(rows)]
    for row in made:
        journal.append(Decided(make_decision(row)))
        journal.append(Close(row))
    writer = LedgerWriter(journal, database)
    started = time.process_time()
    await writer.flush()
    stored = (time.process_time() - started) / rows * 1e6
    journal.close()
    columns = [_ledger_values(row) for row in made]
    reasons = [_decision_values(make_decision(row)) for row in made]
    again = await Database.open(f"sqlite:///{directory}/peer.db")
    await again.close()
    await database.close()
    peer = sqlite3.connect(directory / "peer.db")

    def insert() -> None:
        peer.executemany(f"INSERT INTO ledger VALUES ({', '.join('?' * len(columns[0]))})", columns)
        peer.executemany("INSERT INTO decisions VALUES (?, ?, ?)", reasons)
        peer.commit()

    bare = per_item_us(rows, insert, time.process_time)
    peer.close()
    return {"stored": stored, "sqlite3": bare}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=5000)
    arguments = parser.parse_args()
    samples: dict[str, list[float]] = {}
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
            found = asyncio.run(hot_path(Path(first), arguments.requests))
            found |= asyncio.run(background(Path(second), arguments.requests))
        for name, value in found.items():
            samples.setdefault(name, []).append(value)
    parts = ("authenticate", "admit and settle", "two journal records", "one decision record")
    rows = [Row.of("hot_path_cpu", "tierline", part, "µs/request", samples[part]) for part in parts]
    rows += [
        Row.of("hot_path_cpu", "tierline", "authenticate, admit, 2 records, settle", "µs/request", samples["whole"]),
        Row.of("hot_path_cpu", "os.pwrite alone", "two records of the same size", "µs/request", samples["raw"]),
        Row.of("background_cpu", "tierline", "journal to SQLite, with decision", "µs/row", samples["stored"]),
        Row.of("background_cpu", "sqlite3.executemany", "same rows, one transaction", "µs/row", samples["sqlite3"]),
    ]
    report("ledger", rows)


if __name__ == "__main__":
    main()
