"""Real cache processes one after the other on one data folder: another embedder, encryption, keys that are missing."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache.client import CacheClient
from cache.entry import Entry
from cache.key import CacheKey

MakeKey = Callable[..., CacheKey]
MakeEntry = Callable[..., Entry]
QUESTIONS = [f"What is the capital city of country number {number}?" for number in range(40)]
VARIABLE = "TIERLINE_TEST_CACHE_KEY"


async def test_another_embedder_takes_over_beside_the_traffic(
    make_process: Callable[..., Any],
    tmp_path: Path,
    make_key: MakeKey,
    make_entry: MakeEntry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under encryption. The same words are answered at once, other words once the vectors are made."""
    monkeypatch.setenv(VARIABLE, base64.b64encode(b"k" * 32).decode())
    options = ("--data-dir", str(tmp_path / "data"), "--encryption-key-env", VARIABLE)
    process = make_process(*options, "--embedder-backend", "onnx-int8")
    async with CacheClient(tmp_path / "s", timeout_ms=20_000) as client:
        assert await client.wait_ready(90)
        for text in QUESTIONS:
            await client.store(make_key(text), make_entry(text, text.encode()), "semantic")
        found = await client.lookup(make_key("what's the capital city of country number 7"), "semantic", 0.95)
        assert found.entry is not None
        before = client.fingerprint
        process.end()
        async with asyncio.timeout(10):
            while client.connected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        make_process(*options, "--embedder-backend", "onnx")
        assert await client.wait_connected(60)
        exact = await client.lookup(make_key(QUESTIONS[7]), "semantic", 0.95)
        assert exact.entry is not None
        assert (exact.outcome, exact.entry.answer) == ("exact", QUESTIONS[7].encode())
        assert await client.wait_ready(90)
        assert client.fingerprint != before
        async with asyncio.timeout(60):
            while (stats := await client.stats()).waiting_vectors:
                assert stats.waiting_vectors <= len(QUESTIONS)
                await asyncio.sleep(0.02)
        again = await client.lookup(make_key("what's the capital city of country number 7"), "semantic", 0.95)
        assert again.entry is not None
        assert (again.outcome, again.entry.answer) == ("semantic", QUESTIONS[7].encode())
    kept = b"".join(path.read_bytes() for path in (tmp_path / "data").iterdir() if path.is_file())
    assert b"country number" not in kept


@pytest.mark.parametrize("value", [None, "no key"])
def test_a_process_without_its_key_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    command = [sys.executable, "-m", "cache", "--socket", str(tmp_path / "s"), "--encryption-key-env", VARIABLE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert f"cache.encryption_key_env: {VARIABLE} holds no key" in done.stderr
    assert "Traceback" not in done.stderr
