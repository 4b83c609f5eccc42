"""Chaos: a real gateway in front of a broken server and a healthy one, a fault at a time.

For every case of `chaos_cases.py`: did the client get the whole right answer, or an explicit error where none is
possible; how long did it take; which rows are in the ledger. The servers tell a story of which every character is known
(`mock_story.py`), so missing or repeated text shows. Exit code 1 if a case fails; `tests/bench/test_chaos.py` runs the
same.

    python -m bench.chaos [--only WORDS]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import uvloop
import yaml
from rich.console import Console
from rich.table import Table

from bench.chaos_cases import CASES, LONG, Case
from bench.gateway import free_port, process
from bench.mock_story import STORY, StoryWire
from bench.mock_upstream import MockUpstream
from bench.mock_wire import Record
from bench.report import Row, report

AT_ONCE = 4  # cases that run side by side
LEDGER_S = 20.0  # a row is in the database a quarter of a second after its end; a loaded machine may take longer
LEAVE_S = 1.0  # the server must know so soon that a client has left
PRICE = {"version": "chaos-1", "input_usd_per_million": "1", "output_usd_per_million": "2"}


@dataclasses.dataclass
class Got:
    """What the client got."""

    status: int = 0
    retry_after: str | None = None
    text: str = ""
    finish: str | None = None
    done: bool = False
    after_done: bool = False
    error: str | None = None  # its code
    ids: set[str] = dataclasses.field(default_factory=set)
    begun: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)  # set at the first text
    seconds: float = 0.0
    noticed_s: float | None = None  # after which the server knew that the client had left


@dataclasses.dataclass
class Result:
    """How a case went. `problems` is empty if it went as it should."""

    case: Case
    got: Got
    rows: list[str]
    problems: list[str]


class Stage:
    """The gateway, the servers behind it, and a client."""

    def __init__(self, database: Path, client: httpx.AsyncClient, faulty: MockUpstream) -> None:
        self.database = database
        self.client = client
        self.faulty = faulty

    async def run(self, number: int, case: Case) -> Result:
        """Inject one fault."""
        body = {"messages": [{"role": "user", "content": "Tell me a story"}], "stream": case.stream, **case.body}
        if case.warm:
            await self.client.post("/v1/chat/completions", json={**body, "model": f"warm-{number}"})
        # A model that is asked for by its name has no fallback; one that a policy chooses has.
        body["model"] = "auto" if case.fallback else f"case-{number}"
        got, began = Got(), time.monotonic()
        asking = asyncio.create_task(self._ask(number, body, got))
        problems = []
        try:
            if case.expect == "left":
                got.noticed_s = await self._leave(number, case, asking, got)
            else:
                await asking
        except Exception as error:  # an answer that cannot be read is a result
            problems.append(f"{type(error).__name__}: {error}")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        got.seconds = time.monotonic() - began
        rows = await self._rows(number, len(case.rows))
        return Result(case, got, [row["outcome"] for row in rows], problems + judge(case, got, rows))

    async def _ask(self, number: int, body: dict[str, Any], got: Got) -> None:
        headers = {"x-tierline-tags": f"case={number}"}
        async with self.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            got.status = answer.status_code
            got.retry_after = answer.headers.get("retry-after")
            if answer.headers["content-type"].startswith("application/json"):
                _take(json.loads(await answer.aread()), got, "message")
                return
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    got.done = True
                elif line.startswith("data: "):
                    got.after_done = got.after_done or got.done
                    _take(json.loads(line[6:]), got, "delta")

    async def _leave(self, number: int, case: Case, asking: asyncio.Task[None], got: Got) -> float:
        """Leave when the last attempt is under way; returns how long the server took to notice."""
        model = upstream_model(number, case)

        def records() -> list[Record]:
            return [record for record in self.faulty.records if record.model == model]

        await self.faulty.until(lambda: len(records()) == len(case.rows), LEDGER_S)
        if "interval" in case.fault:
            await asyncio.wait_for(got.begun.wait(), LEDGER_S)
        left = time.monotonic()
        asking.cancel()
        await self.faulty.until(lambda: records()[-1].outcome == "client-gone", LEDGER_S)
        return time.monotonic() - left

    async def _rows(self, number: int, expected: int) -> list[dict[str, Any]]:
        """The ledger's rows of a case, once as many as expected are in the database."""
        query = "SELECT * FROM ledger WHERE json_extract(tags, '$.case') = ? ORDER BY attempt"
        until = time.monotonic() + LEDGER_S
        with contextlib.closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            while True:
                rows = [dict(row) for row in connection.execute(query, (str(number),))]
                if len(rows) >= expected or time.monotonic() > until:
                    return rows
                await asyncio.sleep(0.05)


def _take(fields: dict[str, Any], got: Got, part: str) -> None:
    """Take account of an event of a stream, or of a whole answer."""
    if "error" in fields:
        got.error = fields["error"]["code"]
        return
    got.ids.add(fields["id"])
    for choice in fields["choices"]:
        got.text += choice[part].get("content") or ""
        if got.text:
            got.begun.set()
        got.finish = choice["finish_reason"] or got.finish


def judge(case: Case, got: Got, rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with what the client and the ledger saw."""
    problems = []

    def check(true: bool, problem: str) -> None:
        if not true:
            problems.append(problem)

    outcomes = tuple(row["outcome"] for row in rows)
    check(outcomes == case.rows, f"rows {outcomes} in place of {case.rows}")
    check([row["attempt"] for row in rows] == list(range(1, len(rows) + 1)), "attempts are not numbered from 1")
    for row in rows:
        paid = row["outcome"] in ("success", "cut") or (row["outcome"] == "timeout" and row["output_tokens"])
        check(not paid or row["cost_nanousd"] > 0, f"attempt {row['attempt']} delivered text and cost nothing")
    if case.expect == "left":
        check(got.noticed_s is not None and got.noticed_s <= LEAVE_S, f"the server noticed after {got.noticed_s} s")
        return problems
    check(got.status == case.status, f"status {got.status} in place of {case.status}")
    if case.retry_after is not None:
        low, high = case.retry_after
        check(low <= int(got.retry_after or 0) <= high, f"retry-after {got.retry_after} is not in {case.retry_after}")
    if case.expect == "whole":
        check(got.text == STORY, f"the text is {got.text!r}")
        check(got.finish == "stop", f"the finish reason is {got.finish}")
        check(got.error is None, f"error {got.error}")
        check(got.done == case.stream, "no [DONE]")
        check(not got.after_done, "events after [DONE]")
        check(len(got.ids) == 1, f"ids {got.ids}")
    else:
        check(got.error is not None, "no error")
        check(not got.done, "a broken answer ends with [DONE]")
        begun = bool(got.text) and STORY.startswith(got.text)
        check(begun == (case.expect == "error event"), f"the text is {got.text!r}")
    return problems


def upstream_model(number: int, case: Case) -> str:
    """The fault as a model name that is this case's own: the mock counts requests by name."""
    return f"{case.fault},pad={number}"


def configuration(
    cases: Sequence[Case], faulty: MockUpstream, healthy: MockUpstream, deaf_port: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`tierline.yaml` and the policy: a backend and a model per case, chosen by the request's tag."""
    urls = {
        "mock": faulty.base_url,
        "refused": f"http://127.0.0.1:{free_port()}/v1",
        "unknown name": "http://tierline.invalid/v1",
        "tls": faulty.base_url.replace("http://", "https://"),
        "deaf": f"http://127.0.0.1:{deaf_port}/v1",
    }
    able = ["prefill", "tools"]
    backends: dict[str, Any] = {"healthy": {"base_urls": [healthy.base_url], "timeouts": LONG}}
    models: dict[str, Any] = {"healthy": _model("healthy", "story", able, tier="medium")}
    routes: list[dict[str, str]] = []
    for number, case in enumerate(cases):
        name = f"case-{number}"
        addresses = [urls[case.where], *([healthy.base_url] if case.replica else [])]
        backends[name] = {"base_urls": addresses, "timeouts": case.timeouts, "attempts": case.attempts}
        models[name] = _model(name, upstream_model(number, case), able if case.prefill else able[1:])
        if case.warm:
            models[f"warm-{number}"] = _model(name, "story", able)
        routes.append({"name": name, "when": f'"case={number}" in tags', "model": name})
    settings = {"version": 1, "models": models, "backends": backends, "cache": {"enabled": False}}
    policy = {"version": 1, "name": "default", "owner": "chaos", "routes": routes, "fallback": ["medium"]}
    return settings, {**policy, "cache": {"mode": "off"}}


def _model(backend: str, upstream: str, capabilities: list[str], tier: str = "large") -> dict[str, Any]:
    return {
        "tier": tier,
        "backend": backend,
        "upstream_model": upstream,
        "capabilities": capabilities,
        "price": PRICE,
    }


@contextlib.contextmanager
def deaf() -> Iterator[int]:
    """The port of a listener whose backlog is full: further connections are neither accepted nor refused."""
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = sockets.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@contextlib.asynccontextmanager
async def stage(cases: Sequence[Case]) -> AsyncIterator[Stage]:
    """Everything that the cases need, running. Raises RuntimeError if the gateway does not start."""
    faulty, healthy = MockUpstream(StoryWire("faulty")), MockUpstream(StoryWire("healthy"))
    healthy.asked = faulty.asked  # so that of two replicas whichever is asked first is broken
    await faulty.start()
    await healthy.start()
    try:
        with tempfile.TemporaryDirectory() as folder, deaf() as deaf_port:
            port, url = free_port(), "http://127.0.0.1"
            config = write(Path(folder), port, *configuration(cases, faulty, healthy, deaf_port))
            headers = {"authorization": f"Bearer {await asyncio.to_thread(_key, config)}"}
            command = [sys.executable, "-m", "gateway", "--config", str(config)]
            client = httpx.AsyncClient(base_url=f"{url}:{port}", timeout=60, headers=headers)
            with process(command, 0, stdout=subprocess.DEVNULL) as gateway:
                async with client:
                    await _ready(client, gateway)
                    yield Stage(Path(folder) / "var" / "tierline.db", client, faulty)
    finally:
        await faulty.stop()
        await healthy.stop()


def write(root: Path, port: int, settings: dict[str, Any], policy: dict[str, Any]) -> Path:
    """Write the files of a gateway; returns the path of `tierline.yaml`."""
    settings |= {"server": {"port": port}, "storage": {"data_dir": str(root / "var")}, "policies_dir": "policies"}
    settings["server"]["log"] = {"level": "error"}
    (root / "policies").mkdir()
    (root / "policies" / "default.yaml").write_text(yaml.safe_dump(policy), encoding="utf-8")
    config = root / "tierline.yaml"
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return config


def _key(config: Path) -> str:
    command = [sys.executable, "-m", "gateway.cli", "keys", "create", "--config", str(config), "--json"]
    key: str = json.loads(subprocess.check_output(command, text=True))["key"]
    return key


async def _ready(client: httpx.AsyncClient, gateway: subprocess.Popen[str]) -> None:
    for _ in range(600):
        with contextlib.suppress(httpx.TransportError):
            if (await client.get("/health/ready")).status_code == 200:
                return
        if gateway.poll() is not None:
            break
        await asyncio.sleep(0.1)
    raise RuntimeError("the gateway did not start: its log is above")


async def run(cases: Sequence[Case]) -> list[Result]:
    """Run the cases, a few at a time; results in their order."""
    gate = asyncio.Semaphore(AT_ONCE)
    async with stage(cases) as running:

        async def one(number: int, case: Case) -> Result:
            async with gate:
                return await running.run(number, case)

        return await asyncio.gather(*(one(number, case) for number, case in enumerate(cases)))


def show(results: Sequence[Result]) -> None:
    table = Table(title="chaos")
    for column in ("fault", "client got", "status", "seconds", "ledger", ""):
        table.add_column(column, overflow="fold", justify="right" if column == "seconds" else "left")
    for result in results:
        case, got = result.case, result.got
        seconds = got.noticed_s if got.noticed_s is not None else got.seconds
        verdict = "; ".join(result.problems) or "ok"
        table.add_row(case.title, case.expect, str(got.status), f"{seconds:.2f}", ", ".join(result.rows), verdict)
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(table)
    failed = sum(bool(result.problems) for result in results)
    console.print(f"{len(results)} faults, {failed} failed")


def rows_of(results: Sequence[Result]) -> Iterator[Row]:
    """The report: 1 or 0 per case, how long each took, and the sum."""
    for result in results:
        setting = f"fault={result.case.title}"
        yield Row.of("as_expected", "tierline", setting, "bool", [float(not result.problems)])
        yield Row.of("seconds", "tierline", setting, "s", [result.got.seconds])
    good = sum(not result.problems for result in results)
    yield Row.of("as_expected_share", "tierline", f"faults={len(results)}", "share", [good / len(results)])


def main() -> int:
    arguments = argparse.ArgumentParser(description="Inject faults behind a real gateway and check what comes of each")
    arguments.add_argument("--only", default="", help="cases whose name contains this")
    given = arguments.parse_args()
    cases = [case for case in CASES if given.only in case.title]
    if not cases:
        arguments.error(f"no case is called {given.only!r}")
    results = uvloop.run(run(cases))
    show(results)
    if not given.only:
        report("chaos", rows_of(results), show=False)
    return int(any(result.problems for result in results))


if __name__ == "__main__":
    sys.exit(main())
