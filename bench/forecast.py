"""`make bench-forecast`: what `tierline policy simulate` says of a change, and what then happens.

A real gateway with a policy serves mixed traffic; the change is simulated on what it put on record; then the policy is
changed, and other traffic of the same kind is served. Each figure that was measured then is set beside its forecast.
The models are simulated: how long an answer is, and how long it takes, is drawn anew for each request, by model and
kind of prompt; a larger model says more and takes longer. Prompts are put together of a few sentences, none repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import uvicorn
from sqlalchemy import select
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from bench.gateway import free_port
from bench.report import Row, report
from gateway.access.keys import create_key
from gateway.access.secret import load_secret
from gateway.ledger.database import Database
from gateway.ledger.schema import ledger
from gateway.settings import load

RATE: Final = 40.0  # requests per second, arriving at random
KEYS: Final = 3
# Milliseconds for each token of an answer, and how much longer than the small model's an answer is.
SIZES: Final = {"small": (1.0, 1.0), "medium": (1.5, 1.3), "large": (2.5, 1.6)}
WORDS: Final = (
    "amber",
    "basin",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "harbour",
    "kettle",
    "lantern",
    "orchard",
)
# Kind of prompt: its text, the mean tokens of the small model's answer.
PROMPTS: Final = (
    ("Classify the sentiment of this review as positive, negative or neutral: the {0} {1} was late and {2}.", 4),
    ("Extract the name and the date from this text as JSON: {0} {1} came to {2} on 3 May.", 20),
    ("Hello, how are you today? Tell me about your {0} and the {1}.", 40),
    ("Write a Python function that sorts a list of {0} by {1} and returns the {2}.", 120),
    ("A farmer has {3} {0}s and sells {4} each day. How many are left after a week? Explain step by step.", 90),
    ("Summarise the following report in three sentences. {5}", 60),
)


def policy(long: int, easy: str, hard: str, complexity: float, *, easy_tier: str = "small", more: str = "") -> str:
    """A policy with rules of the usual kinds. `easy` and `hard` are lists of tasks."""
    return f"""\
version: 1
name: default
owner: bench
routes:
  - {{name: long, when: prompt_tokens > {long}, tier: large}}
  - {{name: easy, when: 'task in {easy}', tier: {easy_tier}}}
  - {{name: hard, when: 'task in {hard} && complexity > {complexity}', tier: large}}
  - {{name: rest, tier: medium}}
fallback: [medium, small]
cache: {{mode: "off"}}
{more}"""


NOW: Final = policy(400, '["classification"]', '["math", "coding"]', 0.3)
CHANGES: Final = {
    "cheaper rules": policy(800, '["classification", "extraction", "chat"]', '["math"]', 0.3),
    "dearer rules": policy(200, '["classification"]', '["math", "coding", "summarisation"]', 0.0),
    "labels on a model that never had any": policy(
        400, '["classification"]', '["math", "coding"]', 0.3, easy_tier="medium"
    ),
    "a limit": policy(400, '["classification"]', '["math", "coding"]', 0.3, more="limits: {requests_per_minute: 60}\n"),
}


def upstream() -> Starlette:
    """A server with a model of each size."""
    rng = random.Random(20)

    async def chat(request: Request) -> JSONResponse:
        asked = json.loads(await request.body())
        per_token_ms, longer = SIZES[asked["model"]]
        text = str(asked["messages"][-1]["content"])
        mean = next((mean for form, mean in PROMPTS if text.startswith(form.partition("{")[0])), 40)
        output = 1 + round(rng.gammavariate(3.0, mean * longer / 3))
        prompt = max(1, len(text) // 4)
        await asyncio.sleep((10 + output * per_token_ms * rng.uniform(0.9, 1.1) + prompt * per_token_ms / 20) / 1000)
        choice = {"index": 0, "message": {"role": "assistant", "content": "word " * output}, "finish_reason": "stop"}
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": asked["model"]}
        return JSONResponse({**answer, "choices": [choice], "usage": usage})

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


def prompt(rng: random.Random) -> str:
    """A prompt of a random kind and length."""
    form, _ = rng.choice(PROMPTS)
    report_text = " ".join(rng.choices(WORDS, k=int(rng.lognormvariate(6.0, 0.8)) + 20))
    return form.format(*rng.choices(WORDS, k=3), rng.randrange(50, 500), rng.randrange(1, 9), report_text)


@dataclass
class Site:
    """A gateway, its files and its keys."""

    home: Path
    tokens: list[str]
    own: str  # a key beside those of the traffic, which no limit holds up
    client: httpx.AsyncClient
    statuses: Counter[int] = field(default_factory=Counter)

    async def serve(self, requests: int, rng: random.Random) -> tuple[int, int]:
        """Send requests at the moments of a Poisson process. Returns the span of time, in milliseconds."""
        self.statuses.clear()
        begins = int(time.time() * 1000)
        tasks = []
        for _ in range(requests):
            tasks.append(asyncio.create_task(self._ask(prompt(rng), rng.choice(self.tokens))))
            await asyncio.sleep(rng.expovariate(RATE))
        await asyncio.gather(*tasks)
        return begins, int(time.time() * 1000) + 1

    async def policy_is(self, text: str) -> None:
        """Change the policy, and wait until the gateway follows it."""
        before = await self._version()
        (self.home / "policies/default.yaml").write_text(text)
        while await self._version() == before:  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.1)

    async def rows(self, begins_ms: int, ends_ms: int) -> list[Mapping[Any, Any]]:
        """Ledger rows of a span, once the gateway has written them."""
        await asyncio.sleep(1.5)
        database = await Database.open(f"sqlite:///{self.home}/var/tierline.db", migrate=False)
        async with database.read() as connection:
            span = (ledger.c.ts_ms >= begins_ms, ledger.c.ts_ms < ends_ms)
            found = (await connection.execute(select(ledger).where(*span))).mappings().all()
        await database.close()
        return list(found)

    async def _ask(self, text: str, token: str) -> httpx.Response:
        body = {"model": "auto", "messages": [{"role": "user", "content": text}]}
        headers = {"authorization": f"Bearer {token}"}
        answer = await self.client.post("/v1/chat/completions", json=body, headers=headers)
        self.statuses[answer.status_code] += 1
        return answer

    async def _version(self) -> str:
        return (await self._ask("Hello, how are you today?", self.own)).headers["x-tierline-policy"]


@contextlib.asynccontextmanager
async def site(home: Path) -> AsyncIterator[Site]:
    """A gateway process in front of the models, which are in this one."""
    port, back = free_port(), free_port()
    server = uvicorn.Server(uvicorn.Config(upstream(), port=back, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    (home / "policies").mkdir(parents=True)
    (home / "policies/default.yaml").write_text(NOW)
    models = "".join(
        f"  {name}: {{tier: {name}, backend: up, context_length: 100000, price: {{version: b,"
        f" input_usd_per_million: '{price}', output_usd_per_million: '{4 * price}'}}}}\n"
        for name, price in zip(SIZES, (0.1, 0.4, 1.6), strict=True)
    )
    path = home / "tierline.yaml"
    path.write_text(
        f"version: 1\nserver: {{port: {port}}}\nstorage: {{data_dir: var}}\npolicies_dir: policies\n"
        f"cache: {{enabled: false}}\nbackends: {{up: {{base_urls: ['http://127.0.0.1:{back}/v1']}}}}\nmodels:\n{models}"
    )
    with (home / "log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "--config", str(path), stdout=log, stderr=log
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            await _until_ready(client, process, home / "log")
            settings = load(path)
            database = await Database.open(settings.database_url(), migrate=False)
            secret = load_secret(settings.storage.data_dir / "secret")
            keys = [await create_key(database, secret, name=f"key{i}", team=f"t{i}") for i in range(KEYS + 1)]
            await database.close()
            tokens = [key.token for key in keys]
            await asyncio.sleep(1.5)  # gateways look for keys twice a second
            yield Site(home, tokens[:-1], tokens[-1], client)
    finally:
        process.terminate()
        await process.wait()
        server.should_exit = True
        await serving


async def _until_ready(client: httpx.AsyncClient, process: asyncio.subprocess.Process, log: Path) -> None:
    for _ in range(600):
        with contextlib.suppress(httpx.TransportError):
            if (await client.get("/health/ready")).status_code == 200:
                return
        if process.returncode is not None:
            break
        await asyncio.sleep(0.1)
    said = await asyncio.to_thread(log.read_text)
    raise RuntimeError(f"the gateway does not start:\n{said[-4000:]}")


async def simulated(home: Path, text: str) -> dict[str, Any]:
    """What the command says of a policy."""
    (home / "new.yaml").write_text(text)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from gateway.cli import main; main()", "policy", "simulate", str(home / "new.yaml"),
        "--config", str(home / "tierline.yaml"), "--since", "1d", "--json", stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"policy simulate ended with {process.returncode}")
    found: dict[str, Any] = json.loads(output)
    return found


def measured(rows: Sequence[Mapping[Any, Any]], statuses: Counter[int]) -> dict[str, float]:
    """The figures of what was served."""
    answered = [row for row in rows if row["outcome"] == "success"]
    times = sorted(row["duration_ms"] for row in answered)
    found = {
        "cost_per_request": sum(row["cost_nanousd"] for row in rows) / len(answered),
        "latency_p50": times[len(times) // 2],
        "latency_p95": times[int(len(times) * 0.95)],
        "refused": float(statuses[429]),
    }
    for tier in SIZES:
        found[f"tier {tier}"] = sum(row["tier"] == tier for row in answered) / len(answered)
    return found


def told(forecast: Mapping[str, Any]) -> dict[str, tuple[float, float, float]]:
    """The same figures as they were forecast, with their intervals."""
    figures = forecast["figures"]
    found = {
        name: figures[name]["new"] for name in ("cost_per_request", "latency_p50", "latency_p95") if name in figures
    }
    found |= {f"tier {mix['name']}": mix["new"] for mix in forecast["tiers"] if mix["name"] in SIZES}
    return {name: (one["value"], one["low"], one["high"]) for name, one in found.items()}


async def experiment(change: str, requests: int, seed: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Simulate a change, then make it."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        async with site(Path(folder) / "site") as found:
            begins, ends = await found.serve(requests, rng)
            await found.rows(begins, ends)  # waits until they are written
            forecast = await simulated(found.home, CHANGES[change])
            await found.policy_is(CHANGES[change])
            begins, ends = await found.serve(requests, rng)
            return forecast, measured(await found.rows(begins, ends), found.statuses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each change")
    parser.add_argument("--requests", type=int, default=500, help="before and after each change")
    given = parser.parse_args()
    rows: list[Row] = []
    inside: Counter[str] = Counter()
    compared: Counter[str] = Counter()
    for number in range(given.runs):
        for index, change in enumerate(CHANGES):
            # Other traffic each time: what is unlucky once shall not be so in every row.
            forecast, found = asyncio.run(experiment(change, given.requests, number * len(CHANGES) + index))
            setting = f"{change}, run {number + 1}"
            for name, (value, low, high) in told(forecast).items():
                unit = {"cost_per_request": "nano-dollars", "latency_p50": "ms", "latency_p95": "ms"}.get(name, "share")
                rows.append(Row(name, "forecast", setting, unit, value, low, high, 1))
                rows.append(Row(name, "measured", setting, unit, found[name], found[name], found[name], 1))
                compared[name] += 1
                inside[name] += low <= found[name] <= high
            refused = float(forecast["refused_new"])
            rows.append(Row("refused", "forecast", setting, "requests", refused, refused, refused, 1))
            rows.append(
                Row("refused", "measured", setting, "requests", found["refused"], found["refused"], found["refused"], 1)
            )
    for name, total in compared.items():
        share = inside[name] / total
        rows.append(Row("inside_the_interval", "tierline", name, "share", share, share, share, total))
    share = sum(inside.values()) / sum(compared.values())
    rows.append(Row("inside_the_interval", "tierline", "all", "share", share, share, share, sum(compared.values())))
    report("forecast", rows)


if __name__ == "__main__":
    main()
