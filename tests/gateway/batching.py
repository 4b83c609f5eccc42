"""What the tests of batches have in common: models of every misfortune, input files, the SDK, waiting for an end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
from openai.types import Batch

from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import PRICE, FrontDoor, configuration

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
# By model: how the upstream behaves.
MODELS = {
    "mock": "mock",
    "slow": "answer,delay_ms=150",
    "hanging": "hang",
    "failing": "status,status=500",
    "failing-once": "status,status=500,times=1",
    "refusing": "status,status=422",
}


def document(upstream: MockUpstream, **batches: Any) -> dict[str, Any]:
    """A `tierline.yaml` whose chat models cost half in a batch; `batches` is that section."""
    dear = {"tier": "small", "backend": "up", "price": {"input_usd_per_million": "9", "output_usd_per_million": "9"}}
    models: dict[str, Any] = {name: {**dear, "upstream_model": kind} for name, kind in MODELS.items()}
    models["mock"]["price"] = {**PRICE, "batch_factor": "0.5"}  # so `auto` is this one, which is not the first
    models["vectors"] = {"kind": "embedding", "backend": "up", "price": PRICE}
    made = configuration({"up": upstream}, models)
    made["backends"]["up"] |= {"attempts": 1, "timeouts": {"connect_s": 1, "total_s": 60}}
    return {**made, "batches": batches}


def sdk_of(door: FrontDoor, token: str | None = None) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=token or door.token, max_retries=0)


@asynccontextmanager
async def sdk_at(door: FrontDoor) -> AsyncIterator[openai.AsyncOpenAI]:
    async with sdk_of(door) as client:
        yield client


def line(custom_id: str, model: str = "mock", url: str = CHAT, **body: Any) -> dict[str, Any]:
    if url == CHAT:
        body.setdefault("messages", [{"role": "user", "content": f"Say {custom_id}"}])
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": model, **body}}


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


async def upload(client: openai.AsyncOpenAI, lines: Iterable[Any], **options: Any) -> str:
    file = await client.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch", **options)
    return file.id


async def begin(client: openai.AsyncOpenAI, lines: Iterable[Any], endpoint: Any = CHAT, **options: Any) -> Batch:
    file_id = await upload(client, lines)
    return await client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h", **options)


async def ended(client: openai.AsyncOpenAI, batch: Batch, timeout_s: float = 30) -> Batch:
    async with asyncio.timeout(timeout_s):
        while batch.status not in ENDED:
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def lines_in(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file; none where there is no file."""
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(one) for one in content.text.splitlines()]


def files_under(root: Path) -> list[Path]:
    return [path for path in (root / "var" / "files").glob("*") if path.is_file()]
