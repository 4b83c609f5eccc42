"""A gateway with a real cache process and a policy that promises, in front of a model that says what the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from bench.mock_upstream import MockUpstream
from bench.mock_wire import OpenAIWire, Record, http_answer
from cache.promise.rule import Standing
from cache.stats import CacheStats
from tests.cache.conftest import Process
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door
from tests.gateway.several import until

# Bars are looked for every two seconds.
_FIT_S = 6.0
# The embedder takes the three ways of asking for one question; of two countries, a guard keeps the questions apart.
COUNTRIES = (  # noqa: SIM905
    "France Spain Italy Portugal Greece Austria Hungary Poland Sweden Norway Finland Denmark Ireland Iceland Belgium "
    "Croatia Serbia Bulgaria Romania Ukraine Egypt Morocco Kenya Ghana Nigeria Ethiopia Uganda Zambia Angola Senegal "
    "Brazil Argentina Uruguay Paraguay Bolivia Colombia Ecuador Venezuela Mexico Cuba Canada Japan Mongolia India "
    "Nepal Thailand Vietnam Malaysia Indonesia Australia"
).split()
WAYS = (
    "What is the capital of {}?",
    "Which city is the capital of {}?",
    "Could you tell me what the capital of {} is?",
    "What is the capital city of {}?",
    "Tell me the capital of {}.",
)


def policy(text: str = "", *, name: str = "default") -> str:
    """A policy that may be certified by two dozen audits; `text` are more settings of its cache."""
    return (
        f"version: 1\nname: {name}\nowner: tests\nroutes: [{{tier: small}}]\n"
        f"cache: {{max_false_hit_rate: 0.3, min_audited: 20, audit_rate: 0.3, {text}}}\n"
    )


class Speaking(OpenAIWire):
    """Says what `answer_to` gives for a question, and to a judgement what `judge` gives for its material."""

    def __init__(self) -> None:
        self.answer_to: Callable[[str], str] = lambda question: f"It is the one of {country_of(question)}."
        self.judge: Callable[[Mapping[str, str]], str] = lambda case: (
            "SAME" if case["fresh"] == case["earlier"] else "DIFFERENT"
        )
        self.judged: list[dict[str, str]] = []

    def answer(self, record: Record) -> bytes:
        body = json.loads(record.body)
        said = body["messages"][-1]["content"]
        if body["messages"][0]["content"].startswith("You check a cache of answers."):
            self.judged.append(json.loads(said))
            text = self.judge(self.judged[-1])
        else:
            text = self.answer_to(said)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 12, "completion_tokens": 34, "total_tokens": 46}
        answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"]}
        return http_answer(200, msgspec.json.encode({**answer, "choices": [choice], "usage": usage}))


@dataclass
class Promised:
    """The gateway, its upstream, and the cache process behind it."""

    door: FrontDoor
    upstream: MockUpstream
    wire: Speaking
    process: Process
    policy: str
    outcomes: list[str] = field(default_factory=list)

    async def ask(self, question: str, **more: Any) -> httpx.Response:
        """Ask at temperature 0 and note what the cache did."""
        messages = [{"role": "user", "content": question}]
        response = await self.door.chat("auto", messages=messages, temperature=0, **more)
        assert response.status_code == 200, response.text
        self.outcomes.append(response.headers["x-tierline-cache"])
        return response

    async def ask_all(self, countries: list[str] | tuple[str, ...], ways: tuple[str, ...] = WAYS) -> list[str]:
        """Ask for every capital in every way; returns the outcomes."""
        return [
            (await self.ask(way.format(country))).headers["x-tierline-cache"] for country in countries for way in ways
        ]

    async def stats(self) -> CacheStats:
        assert self.door.services.cache is not None
        return await self.door.services.cache.stats()

    async def standing(self) -> Standing:
        """How the promise of this gateway's policy stands; there must be one."""
        (found,) = [standing for standing in (await self.stats()).promises if standing.policy == self.policy]
        return found

    async def compared(self, labels: int) -> None:
        """Wait until so many answers have been compared."""

        async def enough() -> bool:
            return (await self.standing()).labels >= labels

        await until(enough, f"{labels} comparisons")

    async def came_to_nothing(self, reason: str, before: CacheStats) -> None:
        """Wait until one more ticket has come to nothing for this reason."""

        async def counted() -> bool:
            return (await self.stats()).unjudged.get(reason, 0) == before.unjudged.get(reason, 0) + 1

        await until(counted, f"a ticket that comes to nothing: {reason}")

    async def ask_until(self, outcome: str) -> httpx.Response:
        """Ask for one capital after the other until the cache does this; the promise may take its time to learn."""
        for number, question in enumerate(way.format(country) for country in COUNTRIES for way in WAYS):
            response = await self.ask(question)
            if response.headers["x-tierline-cache"] == outcome:
                return response
            if number:  # before, nothing was there to be found
                await self._let_learn()
        raise AssertionError(f"never {outcome}: {self.outcomes}")

    async def certify(self, countries: list[str]) -> list[str]:
        """Ask until the promise is certified; returns the outcomes."""
        seen: list[str] = []
        for country in countries:
            for way in WAYS:
                seen += await self.ask_all([country], (way,))
                if (await self.standing()).state == "certified":
                    return seen
                await self._let_learn()
        raise AssertionError(f"not certified after {len(seen)} requests: {await self.standing()}")

    async def _let_learn(self) -> None:
        """A bar is found beside the requests, some seconds after there was enough for it. If there was not, go on."""
        standing = await self.standing()
        if standing.state == "learning" and standing.labels > 60 and standing.labels % 5 == 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIT_S):
                    await until(self._has_bar, "a bar")

    async def kill_cache(self) -> None:
        self.process.end(signal.SIGKILL)
        cache = self.door.services.cache
        assert cache is not None
        await until(lambda: not cache.connected, "the cache's end to be seen")

    async def start_cache(self) -> None:
        self.process.start()
        cache = self.door.services.cache
        assert cache is not None
        await until(lambda: cache.connected and cache.state == "ready", "the cache to be back")

    async def _has_bar(self) -> bool:
        return (await self.standing()).bar is not None


def country_of(question: str) -> str:
    return next((country for country in COUNTRIES if country in question), "nowhere")


@asynccontextmanager
async def promised(
    root: Path,
    text: str = "judge: exact",
    *,
    process: Process | None = None,
    judge_model: str = "mock",
    **settings: float,
) -> AsyncIterator[Promised]:
    """Run all of it with files under `root`.

    Args:
        text: settings of the policy's cache.
        process: a cache that runs already; None: one of its own.
        judge_model: what the judging model, of tier large, is called upstream.
        settings: of the platform file's cache.
    """
    wire = Speaking()
    upstream = MockUpstream(wire)
    await upstream.start()
    models = {
        "mock": {"tier": "small", "backend": "up", "price": PRICE},
        "judge": {"tier": "large", "backend": "up", "price": PRICE, "upstream_model": judge_model},
    }
    document = {**configuration({"up": upstream}, models), "cache": {"lookup_timeout_ms": 30_000.0, **settings}}
    sockets = root / "var" / "run"
    sockets.mkdir(parents=True, exist_ok=True)
    own = process is None
    if process is None:
        process = Process(sockets / "cache.sock", "--data-dir", str(root / "var" / "cache"))
        process.start()
    else:
        (sockets / "cache.sock").symlink_to(process.socket)
    name = f"p-{uuid.uuid4()}"  # a promise of its own
    try:
        async with front_door(root, document, policy=policy(text, name=name)) as door:
            assert door.services.cache is not None
            assert await door.services.cache.wait_ready(90)
            yield Promised(door, upstream, wire, process, name)
    finally:
        await upstream.stop()
        if own and process.popen is not None and process.popen.poll() is None:
            process.end()
