"""What is kept, where, and for how long: database, Redis, answers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from gateway.settings.strict import Strict


class StorageSettings(Strict):
    data_dir: Path = Field(Path("var"), description="Database, journal, models, sockets, first key.")
    database_url: str | None = Field(None, description="SQLAlchemy URL; default: SQLite in data_dir.")
    redis_url: str | None = Field(
        None,
        pattern=r"^(redis|rediss|unix)://",
        description="Shares limits, budgets and cached answers between processes.",
    )
    redis_timeout_ms: float = Field(50.0, gt=0, description="A slower Redis counts as away.")


class CacheSettings(Strict):
    enabled: bool = True
    embedder: str = "all-MiniLM-L6-v2"
    embedder_backend: Literal["auto", "torch", "onnx", "onnx-int8"] = Field(
        "auto", description="What computes the vectors; after a change every question gets a new one."
    )
    similarity_threshold: float = Field(0.95, gt=0, le=1)
    ttl_seconds: float = Field(86_400, gt=0)
    max_entries: int = Field(1_000_000, ge=1, description="Those worth least go first.")
    max_bytes: int = Field(512 * 1024 * 1024, ge=1 << 20, description="Of memory, most of it for vectors in use.")
    max_disk_bytes: int = Field(4 * 1024**3, ge=1 << 20, description="Of the file of answers, its journal left out.")
    encryption_key_env: str | None = Field(
        None, min_length=1, description="Environment variable with the keys that answers and questions are kept under."
    )
    max_batch_size: int = Field(8, ge=1)
    max_wait_ms: float = Field(0.0, ge=0)
    load_wait_ms: float = Field(
        50.0, ge=0, description="How long a look-up waits where questions have yet to be read from the file."
    )
    lookup_timeout_ms: float = Field(250.0, gt=0, description="A slower look-up counts as a miss.")
    hit_jitter_ms: float = Field(
        0.0, ge=0, le=60_000, description="A hit waits a random time up to this, so that its speed tells less."
    )
    redis_max_bytes: int = Field(
        256 * 1024 * 1024, ge=1 << 20, description="Of all answers in Redis, which the cache processes share there."
    )
    threads: int = Field(1, ge=1)
    judge_concurrency: int = Field(4, ge=1, description="Answers that models compare at a time, per gateway process.")
    judge_per_minute: int = Field(120, ge=1, description="Likewise per minute; what is beyond is not compared.")
    embeddings_port: int | None = Field(None, ge=1, le=65535, description="Serve the embedder over HTTP, for backends.")


class ResponsesSettings(Strict):
    """Answers of `/v1/responses` that are kept, with what was asked, so that clients can look them up and go on."""

    keep_days: int = Field(
        30, ge=0, le=3650, description="A conversation is kept so long after its last turn; 0: nothing is kept."
    )
    max_bytes: int = Field(
        4 * 1024**3, ge=1 << 20, description="Of all conversations; those that have rested longest go first."
    )


class IdempotencySettings(Strict):
    """Answers kept for requests that are sent again with their `Idempotency-Key`: in each process, and in Redis where
    `storage.redis_url` names one, with the same bounds there for all processes together."""

    ttl_seconds: float = Field(86_400, gt=0, description="How long an answer can be given again.")
    max_entries: int = Field(100_000, ge=1, description="The oldest answers go first.")
    max_bytes: int = Field(
        128 * 1024 * 1024, ge=1 << 20, description="Likewise; an answer larger than an eighth of it is not kept."
    )
    finish_seconds: float = Field(
        120.0, ge=0, description="How long a request with a key runs on when its client has left."
    )
