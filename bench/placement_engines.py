"""Two bundled engines with the small model behind a gateway: conversations that take turns with each other, once with
placement by what the engines hold, once with it off.

Every conversation begins with a long text of its own and goes on by its own answers, so that all but the latest turn is
computed already somewhere. Measured from the client: share of prompt tokens that came from a cache, and time to the
first token. Engines and gateway share the machine's cores, in both cases alike.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from bench.bundled import CONTEXT_TOKENS, MODEL, gateway, pulled_model
from bench.engine import EngineProcess
from bench.report import Row

CONVERSATIONS = 6
AT_ONCE = 2
WORDS = ("river", "bridge", "contract", "winter", "engine", "letter", "garden", "market", "signal", "harbour")
SYSTEMS = ("tierline_events", "tierline_sent", "off")


async def measure(rounds: int, runs: int) -> list[Row]:
    model = pulled_model()
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SYSTEMS}
    for run in range(runs):
        for name in SYSTEMS:  # in turns, so that a slow minute of the machine hits all of them
            found[name].append(await _run(name, model, rounds, run))
            print(name, found[name][-1], file=sys.stderr, flush=True)
    setting = f"engines=2 conversations={CONVERSATIONS} turns={rounds} at_once={AT_ONCE}"
    rows = []
    for name, measured in found.items():
        shares, medians, slowest = zip(*measured, strict=True)
        rows.append(Row.of("cached_token_share", name, setting, "of prompt tokens", shares))
        rows.append(Row.of("ttft_p50", name, setting, "s", medians))
        rows.append(Row.of("ttft_p95", name, setting, "s", slowest))
    return rows


async def _run(name: str, model: Path, rounds: int, run: int) -> tuple[float, float, float]:
    os.environ["TIERLINE_PAGE_SEED"] = secrets.token_hex(32)
    arguments = ["--threads", "1", "--max-model-len", str(CONTEXT_TOKENS), "--kv-cache-bytes", str(256 << 20)]
    engines = [EngineProcess(model, arguments) for _ in range(2)]
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
            for engine in engines:
                await engine.wait_ready(session)
            with (
                tempfile.TemporaryDirectory() as folder,
                gateway(_backend(name, [e.url for e in engines]), Path(folder)) as door,
            ):
                return await _converse(session, *door, rounds, run)
    finally:
        for engine in engines:
            engine.stop()


def _backend(name: str, urls: list[str]) -> dict[str, Any]:
    """Both engines, placed as the system `name` does."""
    return {"base_urls": [f"{url}/v1" for url in urls], "placement": {"prefix": name.removeprefix("tierline_")}}


async def _converse(
    session: aiohttp.ClientSession, url: str, key: str, rounds: int, run: int
) -> tuple[float, float, float]:
    rng = random.Random(run)
    turns: list[list[dict[str, str]]] = []
    for number in range(CONVERSATIONS):
        text = " ".join(rng.choices(WORDS, k=500))
        turns.append([{"role": "system", "content": f"Conversation {number}. {text}"}])
    prompt_tokens, cached, times = 0, 0, []
    at_once = asyncio.Semaphore(AT_ONCE)

    async def turn(messages: list[dict[str, str]], question: str) -> None:
        nonlocal prompt_tokens, cached
        async with at_once:
            messages.append({"role": "user", "content": question})
            body = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0, "stream": True}
            body["stream_options"] = {"include_usage": True}
            headers = {"authorization": f"Bearer {key}"}
            began, first, said, usage = time.monotonic(), None, "", None
            async with session.post(f"{url}/chat/completions", json=body, headers=headers) as response:
                response.raise_for_status()
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    usage = event.get("usage") or usage
                    text = event["choices"][0]["delta"].get("content") if event["choices"] else None
                    if text:
                        first = first or time.monotonic() - began
                        said += text
            messages.append({"role": "assistant", "content": said})
            assert usage is not None
            prompt_tokens += usage["prompt_tokens"]
            cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            times.append(first or time.monotonic() - began)

    for number in range(rounds):
        order = rng.sample(turns, len(turns))  # who comes when: nobody's turn is always the same replica's
        await asyncio.gather(*(turn(messages, f"Question {number}: what is next?") for messages in order))
    times.sort()
    return cached / prompt_tokens, statistics.median(times), times[int(0.95 * len(times))]
