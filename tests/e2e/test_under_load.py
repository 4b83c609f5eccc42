"""Many streams at once, clients that leave, and a gateway that is killed: no page leaks and no row is lost."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sqlite3
import time
from contextlib import closing
from typing import Any

import httpx
import pytest

from tests.conftest import Stack


def gauge(metrics: str, name: str, **labels: str) -> float:
    """One sample of a metrics page."""
    for line in metrics.splitlines():
        if line.startswith(f"{name}{{") and all(f'{label}="{value}"' in line for label, value in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"{name} {labels} is not on the metrics page")


async def stream(
    client: httpx.AsyncClient, number: int, *, max_tokens: int, leave_after: int | None = None
) -> tuple[str, str]:
    """One streamed answer; its request id and how it ended: done, left or broken."""
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": f"Write a long story, number {number}."}],
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0.8,
    }
    headers = {"x-tierline-cache": "no-cache, no-store"}
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        seen = 0
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return response.headers["x-request-id"], "done"
            if line.startswith("data: ") and '"content"' in line:
                seen += 1
                if leave_after is not None and seen >= leave_after:
                    return response.headers["x-request-id"], "left"
    return response.headers["x-request-id"], "broken"


def of_requests(stack: Stack, column: str, request_ids: set[str]) -> dict[str, list[Any]]:
    """What the ledger has in a column, attempt by attempt, of these requests."""
    with closing(sqlite3.connect(f"file:{stack.data_dir}/tierline.db?mode=ro", uri=True)) as database:
        rows = database.execute(f"SELECT request_id, {column} FROM ledger ORDER BY attempt").fetchall()
    found: dict[str, list[Any]] = {}
    for request_id, value in rows:
        if request_id in request_ids:
            found.setdefault(request_id, []).append(value)
    return found


async def wait_for_pages(stack: Stack, timeout_s: float = 10) -> str:
    """The metrics page once no page of the engine is in use."""
    async with httpx.AsyncClient(base_url=stack.base_url) as client:
        deadline = time.monotonic() + timeout_s
        while True:
            page = (await client.get("/metrics")).text
            if gauge(page, "tierline_engine_pages", state="used") == 0:
                return page
            assert time.monotonic() < deadline, page
            await asyncio.sleep(0.05)


async def test_64_streams_of_which_16_leave(tierline_stack: Stack) -> None:
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {tierline_stack.key}"}
    async with httpx.AsyncClient(
        base_url=tierline_stack.base_url, headers=headers, timeout=300, limits=limits
    ) as client:
        ended = await asyncio.gather(
            # Who leaves has asked for so much that it cannot be all there before the leaving is noticed: a client
            # that is slow to read, on a busy machine, has been sent a short answer whole by then.
            *(
                stream(client, n, max_tokens=1000, leave_after=6) if n % 4 == 0 else stream(client, n, max_tokens=24)
                for n in range(64)
            )
        )
    assert sorted(how for _, how in ended) == ["done"] * 48 + ["left"] * 16
    page = await wait_for_pages(tierline_stack)
    total, free, cached = (gauge(page, "tierline_engine_pages", state=s) for s in ("total", "free", "cached"))
    assert free + cached == total
    tierline_stack.wait_for_ledger()
    outcomes = of_requests(tierline_stack, "outcome", {id for id, _ in ended})
    assert {id: outcomes[id] for id, _ in ended} == {
        id: ["success" if how == "done" else "cancelled"] for id, how in ended
    }
    # Who leaves before the usage comes has had the same prompt read: those of one digit have one token less.
    tokens = of_requests(tierline_stack, "input_tokens", {id for id, _ in ended})
    by_end = {end: {tokens[id][0] for id, how in ended if how == end} for end in ("done", "left")}
    assert by_end["left"] <= by_end["done"]


async def test_a_killed_gateway_loses_no_row_that_a_client_saw(tierline_stack: Stack) -> None:
    headers = {"authorization": f"Bearer {tierline_stack.key}"}
    seen: set[str] = set()
    finished: set[str] = set()
    enough = asyncio.Event()

    async def keep_asking(client: httpx.AsyncClient, number: int) -> None:
        while True:
            try:
                request_id, how = await stream(client, number, max_tokens=4)
            except httpx.TransportError:
                return
            seen.add(request_id)
            if how == "done":
                finished.add(request_id)
                if len(finished) >= 12:
                    enough.set()

    async with httpx.AsyncClient(base_url=tierline_stack.base_url, headers=headers, timeout=60) as client:
        tasks = [asyncio.create_task(keep_asking(client, n)) for n in range(6)]
        async with asyncio.timeout(60):
            await enough.wait()
        os.kill(tierline_stack.pid_of("gateway"), signal.SIGKILL)
        await asyncio.gather(*tasks)
    tierline_stack.wait_until_ready()
    tierline_stack.wait_for_ledger()
    found = of_requests(tierline_stack, "outcome", seen)
    for request_id in seen:
        outcomes = found.get(request_id, [])
        assert len(outcomes) == 1, (request_id, outcomes)
        assert outcomes[0] in ("success", "interrupted")
        if request_id in finished:
            assert outcomes[0] == "success", request_id
    for request_id in (min(finished), *sorted(seen - finished)[:1]):  # and the command says the same
        explained = json.loads(tierline_stack.cli("explain", request_id, "--json").stdout)
        assert [row["outcome"] for row in explained["attempts"]] == found[request_id]


def stored(stack: Stack) -> dict[str, tuple[Any, ...]]:
    """The rows of the ledger: who, how it ended, when, and what it cost."""
    with closing(sqlite3.connect(f"file:{stack.data_dir}/tierline.db?mode=ro", uri=True)) as database:
        found = database.execute("SELECT attempt_id, request_id, outcome, ts_ms, duration_ms, cost_nanousd FROM ledger")
        return {row[0]: row[1:] for row in found}


def test_the_report_adds_up_to_the_rows(tierline_stack: Stack) -> None:
    tierline_stack.wait_for_ledger()
    before = stored(tierline_stack)
    whole = json.loads(tierline_stack.cli("cost", "report", "--by", "", "--json").stdout)
    split = json.loads(tierline_stack.cli("cost", "report", "--by", "team,model,tier,day,outcome", "--json").stdout)
    after = stored(tierline_stack)
    assert after == before, f"rows came although nothing was running: {dict(after.items() - before.items())}"
    assert sum(row["cost_nanousd"] for row in split["rows"]) == split["total"]["cost_nanousd"]
    assert split["total"]["cost_nanousd"] == whole["total"]["cost_nanousd"] > 0
    assert whole["total"]["cost_nanousd"] == sum(row[-1] for row in after.values())
    table = tierline_stack.cli("cost", "report", "--by", "model").stdout
    assert "smollm2-135m" in table
    assert re.match(r"^team,", tierline_stack.cli("cost", "report", "--by", "team", "--format", "csv").stdout)


@pytest.mark.parametrize("process", ["cache"])
def test_without_the_cache_the_gateway_serves_on(tierline_stack: Stack, process: str) -> None:
    headers = {"authorization": f"Bearer {tierline_stack.key}"}
    with httpx.Client(base_url=tierline_stack.base_url, headers=headers, timeout=60) as client:
        os.kill(tierline_stack.pid_of(process), signal.SIGKILL)
        body = {"model": "auto", "messages": [{"role": "user", "content": "Are you still there?"}], "max_tokens": 4}
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200
        deadline = time.monotonic() + 60
        while client.get("/health/ready").json()["cache"] != "connected":
            assert time.monotonic() < deadline
            time.sleep(0.1)
