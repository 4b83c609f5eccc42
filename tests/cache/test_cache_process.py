"""The real process behind its socket: hits, isolation, faults, restarts, bounds, and the end of its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cache import wire
from cache.client import CacheClient, CacheUnavailable
from cache.entry import Entry
from cache.key import CacheKey

MakeKey = Callable[..., CacheKey]
MakeEntry = Callable[..., Entry]
FRANCE = "What is the capital of France?"


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 30) -> None:
    """Wait for what another process does, which sends no event."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.01)


async def test_exact_then_semantic_then_never(client: CacheClient, make_key: MakeKey, make_entry: MakeEntry) -> None:
    miss = await client.lookup(make_key(FRANCE), "semantic", 0.95)
    assert (miss.outcome, miss.reason) == ("miss", "no_entry")
    entry = make_entry(FRANCE, b'{"choices": []}')
    assert await client.store(make_key(FRANCE), entry, "semantic") is None

    exact = await client.lookup(make_key(FRANCE), "semantic", 0.95)
    assert (exact.outcome, exact.score, exact.entry) == ("exact", 1.0, entry)
    for reworded in ("What's the capital city of France?", "Which city is the capital of France?"):
        hit = await client.lookup(make_key(reworded), "semantic", 0.95)
        assert (hit.outcome, hit.entry) == ("semantic", entry), reworded
        assert hit.score is not None
        assert 0.9 < hit.score < 1
        assert (await client.lookup(make_key(reworded), "exact", 0.95)).outcome == "miss"
    for other, reason in (
        ("What is the capital of Spain?", "below_threshold"),
        ("What was the capital of France?", "tense"),
    ):
        found = await client.lookup(make_key(other), "semantic", 0.95)
        assert (found.outcome, found.reason, found.entry) == ("miss", reason, None)
        assert found.score is not None


async def test_the_same_words_written_otherwise(client: CacheClient, make_key: MakeKey, make_entry: MakeEntry) -> None:
    entry = make_entry(FRANCE)
    await client.store(make_key(FRANCE), entry, "semantic")
    before = await client.stats()
    for text in ("what is the capital of france", "What is the capital of France", "What  is the capital of FRANCE ?"):
        # Whatever the vectors say: at threshold 1 they allow nothing but themselves.
        hit = await client.lookup(make_key(text), "semantic", 1.0)
        assert (hit.outcome, hit.score, hit.entry) == ("semantic", 1.0, entry), text
        assert (await client.lookup(make_key(text), "exact", 0.95)).outcome == "miss"
        assert (await client.lookup(make_key(text, seed=5), "semantic", 1.0)).outcome == "miss"
    # Only the look-ups of another context, and of these not the one whose asked form is the entry's own.
    assert (await client.stats()).embedded_texts == before.embedded_texts + 2
    assert (await client.purge([make_key(FRANCE).scope])).removed == 1
    assert (await client.lookup(make_key("what is the capital of france"), "semantic", 1.0)).outcome == "miss"


@pytest.mark.parametrize("asked", ["what's the capital of France", "Tell me the capital city of France."])
async def test_another_way_of_asking_is_found(
    client: CacheClient, make_key: MakeKey, make_entry: MakeEntry, asked: str
) -> None:
    entry = make_entry(FRANCE)
    await client.store(make_key(FRANCE), entry, "semantic")
    found = await client.lookup(make_key(asked), "semantic", 0.95)
    assert (found.outcome, found.entry) == ("semantic", entry)


async def test_a_preposition_that_is_another_is_named(
    client: CacheClient, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    asked = "How do I move money to a savings account?"
    await client.store(make_key(asked), make_entry(asked), "semantic")
    found = await client.lookup(make_key(asked.replace(" to ", " from ")), "semantic", 0.95)
    assert (found.outcome, found.reason) == ("miss", "relation")


async def test_case_that_matters_is_no_mere_writing(
    client: CacheClient, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    milli, mega = make_entry("What is 5 mW in watts?"), make_entry("What is 5 MW in watts?")
    await client.store(make_key(milli.question), milli, "semantic")
    found = await client.lookup(make_key("What is 5 MW in watts"), "semantic", 0.95)
    assert (found.outcome, found.reason) == ("miss", "case")
    await client.store(make_key(mega.question), mega, "semantic")
    hit = await client.lookup(make_key("What is 5 MW in watts"), "semantic", 0.95)
    assert hit.entry == mega


async def test_no_answer_crosses_tenant_model_context_or_epoch(
    client: CacheClient, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    await client.store(make_key(FRANCE), make_entry(FRANCE), "semantic")
    for other in ({"scope": "team:other"}, {"model_group": "large"}, {"epoch": 1}, {"seed": 5}):
        for text in (FRANCE, "What's the capital city of France?"):
            assert (await client.lookup(make_key(text, **other), "semantic", 0.8)).reason == "no_entry"


async def test_an_answer_stored_for_exact_use_is_not_found_by_other_words(
    client: CacheClient, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    await client.store(make_key(FRANCE), make_entry(FRANCE), "exact")
    assert (await client.lookup(make_key(FRANCE), "semantic", 0.95)).outcome == "exact"
    for other in ("What's the capital of France?", "what is the capital of france"):
        assert (await client.lookup(make_key(other), "semantic", 0.95)).outcome == "miss"


async def test_time_limits(client: CacheClient, make_key: MakeKey, make_entry: MakeEntry) -> None:
    assert await client.store(make_key("a"), make_entry("a", now=time.time() - 100, ttl_s=50), "exact") == "expired"
    await client.store(make_key("b"), make_entry("b", now=time.time() - 100, ttl_s=500), "semantic")
    assert (await client.lookup(make_key("b"), "semantic", 0.95, ttl_s=90)).outcome == "miss"
    assert (await client.lookup(make_key("b"), "semantic", 0.95, ttl_s=200)).outcome == "exact"
    assert (await client.lookup(make_key("B"), "semantic", 0.95, ttl_s=90)).outcome == "miss"


async def test_what_the_embedder_refuses_is_a_miss_that_says_so(client: CacheClient, make_key: MakeKey) -> None:
    assert (await client.lookup(make_key("如何开启深色模式"), "semantic", 0.95)).reason == "script_not_covered"
    assert (await client.lookup(make_key("a " * 300), "semantic", 0.95)).reason == "too_long"


async def test_stats_purge_and_embed(client: CacheClient, make_key: MakeKey, make_entry: MakeEntry, scope: str) -> None:
    before = await client.stats()
    await client.store(make_key("one"), make_entry("one", model="m1"), "exact")
    await client.store(make_key("two"), make_entry("two", model="m2"), "exact")
    await client.lookup(make_key("one"), "exact", 0.95)
    await client.lookup(make_key("three"), "exact", 0.95)
    after = await client.stats()
    assert after.state == "ready"
    assert after.entries == before.entries + 2
    assert after.bytes >= before.bytes > 0
    assert after.lookups == before.lookups + 2
    assert after.exact_hits == before.exact_hits + 1
    assert after.misses["no_entry"] == before.misses.get("no_entry", 0) + 1
    assert after.saved_nanousd == before.saved_nanousd + 1234
    assert (await client.purge([scope], model="m2")).removed == 1
    await client.store(make_key("three"), make_entry("three"), "exact")
    found = await client.lookup(make_key("three"), "exact", 0.95)
    assert found is not None
    assert (await client.purge([f"{scope}-of-others"], entry=found.entry_id)).removed == 0
    assert (await client.purge(entry=found.entry_id)).removed == 1
    assert (await client.purge([scope])).removed == 1
    vectors = await client.embed(["a", "b"])
    assert [len(vector) for vector in vectors] == [384, 384]
    with pytest.raises(CacheUnavailable) as refused:
        await client.embed(["如何"])
    assert refused.value.reason == "script_not_covered"


async def test_many_at_once_each_get_their_own(client: CacheClient, make_key: MakeKey, make_entry: MakeEntry) -> None:
    names = ["Oslo", "Lima", "Cairo", "Quito", "Accra", "Delhi", "Hanoi", "Paris"]
    for name in names:
        await client.store(make_key(f"How old is {name}?"), make_entry(name, name.encode()), "semantic")
    found = await asyncio.gather(
        *(client.lookup(make_key(f"How old is {name}?"), "semantic", 0.95) for name in names * 20)
    )
    assert [hit.entry.answer.decode() if hit.entry else None for hit in found] == names * 20


async def test_the_scripts_and_the_fingerprint_are_announced(client: CacheClient) -> None:
    assert client.scripts == {"latin"}
    assert client.fingerprint is not None
    assert len(client.fingerprint) == 64


async def test_without_a_process_everything_is_a_quick_miss(
    tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    async with CacheClient(tmp_path / "nobody", timeout_ms=5000) as client:
        started = time.monotonic()
        assert (await client.lookup(make_key("a"), "semantic", 0.95)).reason == "unavailable"
        assert await client.store(make_key("a"), make_entry("a"), "exact") == "unavailable"
        with pytest.raises(CacheUnavailable, match="No cache process"):
            await client.stats()
        assert time.monotonic() - started < 1
        assert not client.connected
        assert client.fingerprint is None


async def test_kill_9_gives_misses_then_hits_again(
    make_process: Callable[..., Any], tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    """Killed while look-ups are under way; back on the same socket with its entries, and the client finds it itself."""
    process = make_process("--data-dir", str(tmp_path / "data"))
    async with CacheClient(tmp_path / "s", timeout_ms=20_000) as client:
        assert await client.wait_connected(60)
        assert await client.store(make_key("a"), make_entry("a", b"kept"), "semantic") is None
        assert (await client.lookup(make_key("a"), "semantic", 0.95)).outcome == "exact"

        async def written() -> bool:
            return (await client.stats()).unwritten == 0

        await until(written)

        under_way = [asyncio.create_task(client.lookup(make_key("a"), "semantic", 0.95)) for _ in range(200)]
        await asyncio.sleep(0)
        process.end(signal.SIGKILL)
        outcomes = {(found.outcome, found.reason) for found in await asyncio.gather(*under_way)}
        assert outcomes <= {("exact", None), ("miss", "unavailable")}
        await until(lambda: not client.connected)
        assert (await client.lookup(make_key("a"), "semantic", 0.95)).reason == "unavailable"

        process.start()
        assert await client.wait_connected(60)

        found = await client.lookup(make_key("a"), "semantic", 0.95)
        assert found.entry is not None
        assert (found.outcome, found.entry.answer) == ("exact", b"kept")


async def test_an_answer_stored_while_the_model_loads_is_found_by_other_words_later(
    make_process: Callable[..., Any], tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    make_process("--data-dir", str(tmp_path / "data"))
    async with CacheClient(tmp_path / "s", timeout_ms=20_000) as client:
        assert await client.wait_connected(60)
        assert await client.store(make_key(FRANCE), make_entry(FRANCE), "semantic") is None
        assert await client.store(make_key("an exact one"), make_entry("an exact one"), "exact") is None
        assert await client.wait_ready(90)

        async def found() -> bool:
            return (
                await client.lookup(make_key("What's the capital of France?"), "semantic", 0.95)
            ).outcome == "semantic"

        await until(found)
        stats = await client.stats()
        assert (stats.entries, stats.vectors) == (2, 1)


async def test_a_hung_process_costs_no_more_than_the_time_limit(
    make_process: Callable[..., Any], tmp_path: Path, make_key: MakeKey
) -> None:
    process = make_process()
    async with CacheClient(tmp_path / "s", timeout_ms=100) as client:
        assert await client.wait_connected(60)
        os.kill(process.popen.pid, signal.SIGSTOP)
        started = time.monotonic()
        assert (await client.lookup(make_key("a"), "semantic", 0.95)).reason == "timeout"
        assert 0.1 <= time.monotonic() - started < 5
        os.kill(process.popen.pid, signal.SIGCONT)

        async def answers() -> bool:
            return (await client.lookup(make_key("a"), "exact", 0.95)).reason == "no_entry"

        await until(answers)


async def test_garbage_from_the_other_side_is_a_miss(tmp_path: Path, make_key: MakeKey) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.frame(wire.Hello(0, wire.PROTOCOL_VERSION, "ready", "f" * 64, ["latin"])))
        await reader.read(1)
        writer.write(b"\x00\x00\x00\x05hello" * 3)
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(babble, tmp_path / "s")
    async with server, CacheClient(tmp_path / "s", timeout_ms=20_000) as client:
        assert await client.wait_connected(10)
        assert (await client.lookup(make_key("a"), "semantic", 0.95)).reason == "unavailable"
        assert await client.wait_connected(10), "it tries again"


async def test_another_version_of_the_protocol_is_never_used(tmp_path: Path) -> None:
    greeted = asyncio.Event()

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.frame(wire.Hello(0, wire.PROTOCOL_VERSION + 1, "ready", "f" * 64, [])))
        await reader.read()
        greeted.set()
        writer.close()

    server = await asyncio.start_unix_server(other, tmp_path / "s")
    async with server, CacheClient(tmp_path / "s", timeout_ms=100) as client:
        async with asyncio.timeout(10):
            await greeted.wait()
        assert not client.connected
        assert client.fingerprint is None


async def test_a_client_that_babbles_is_disconnected_and_the_process_lives_on(
    cache_socket: Path, client: CacheClient
) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x04\xff\xff\xff\xff"):
        reader, writer = await asyncio.open_unix_connection(cache_socket)
        writer.write(garbage)
        async with asyncio.timeout(20):
            await reader.read()  # ends only when the process closes the connection
        writer.close()
    assert (await client.stats()).state == "ready"


def test_the_socket_is_the_owners_alone(cache_socket: Path) -> None:
    assert cache_socket.stat().st_mode & 0o077 == 0


def test_a_second_process_on_the_same_socket_refuses(cache_socket: Path) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "cache", "--socket", str(cache_socket)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 1
    assert "another cache process listens" in second.stderr
    assert cache_socket.exists()


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--max-entries", "0"], 2, "1 or more"),
        (["--max-wait-ms", "-1"], 2, "0 or more"),
        (["--embedder", "/nowhere/at/all"], 1, "neither a folder nor bundled"),
    ],
)
def test_wrong_options_are_clear_errors(tmp_path: Path, options: list[str], code: int, says: str) -> None:
    command = [sys.executable, "-m", "cache", "--socket", str(tmp_path / "s"), *options]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert found.returncode == code
    assert says in found.stderr


async def test_it_ends_on_sigterm_and_removes_its_socket(make_process: Callable[..., Any], tmp_path: Path) -> None:
    process = make_process()
    await until(lambda: (tmp_path / "s").exists())
    assert process.end() == 0
    assert not (tmp_path / "s").exists()


def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """The child holds the pipe's other end: the pipe ends when the last of the two processes has."""
    socket = tmp_path / "s"
    script = (
        "import pathlib, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-m', 'cache', '--socket', {str(socket)!r}])\n"
        f"while not pathlib.Path({str(socket)!r}).exists(): time.sleep(0.01)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        watchdog = threading.Timer(30, os.kill, (child, signal.SIGKILL))
        watchdog.start()
        try:
            assert parent.stdout.read() == ""
        finally:
            watchdog.cancel()
    assert not socket.exists(), "it was killed by the watchdog, it did not end by itself"
