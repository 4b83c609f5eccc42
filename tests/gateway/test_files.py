"""`/v1/files`: what is uploaded comes back byte for byte, is the project's alone, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from sqlalchemy import event

from bench.mock_upstream import MockUpstream
from gateway.files.content import StorageFull
from gateway.files.store import FileStore, lines_of
from gateway.ledger.database import Database
from gateway.ledger.rows import now_ms
from gateway.ledger.schema import file_chunks, files
from tests.gateway.batching import begin, document, files_under, line, sdk_at, sdk_of, upload
from tests.gateway.front_door import FrontDoor, eventually, front_door


@pytest_asyncio.fixture
async def door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    bounds = {"max_file_bytes": 2_000_000, "max_project_bytes": 3_000_000}
    async with front_door(tmp_path, document(upstream, **bounds)) as running:
        yield running


@pytest_asyncio.fixture
async def sdk(door: FrontDoor) -> AsyncIterator[openai.AsyncOpenAI]:
    async with sdk_at(door) as client:
        yield client


async def test_a_file_comes_back_as_it_went(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    content = os.urandom(1_500_000)
    made = await sdk.files.create(file=("ä b.jsonl", content), purpose="batch")
    assert (made.object, made.bytes, made.filename, made.purpose, made.status) == (
        "file", len(content), "ä b.jsonl", "batch", "processed",
    )  # fmt: skip
    assert made.expires_at == made.created_at + 30 * 86_400
    assert await sdk.files.retrieve(made.id) == made
    assert (await sdk.files.content(made.id)).content == content
    assert [file.id async for file in sdk.files.list()] == [made.id]
    (path,) = files_under(door.root)
    assert path.stat().st_mode & 0o777 == 0o600
    assert (await sdk.files.delete(made.id)).deleted
    assert files_under(door.root) == []
    for call in (sdk.files.retrieve, sdk.files.content, sdk.files.delete):
        with pytest.raises(openai.NotFoundError, match="no file"):
            await call(made.id)


async def test_pages_and_other_projects(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    made = [await upload(sdk, [line(str(i))]) for i in range(3)]
    assert [file.id async for file in sdk.files.list(limit=2)] == made[::-1]
    assert [file.id async for file in sdk.files.list(limit=1, order="asc")] == made
    assert [file async for file in sdk.files.list(purpose="vision")] == []
    async with sdk_of(door, await door.key(project="other")) as other:
        assert [file async for file in other.files.list()] == []
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(made[0])


async def test_what_is_too_much_is_refused_and_gone(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="max_file_bytes") as large:
        await sdk.files.create(file=("a", b"x" * 2_000_001), purpose="batch")
    assert large.value.status_code == 413
    await sdk.files.create(file=("a", b"x" * 1_900_000), purpose="batch")
    with pytest.raises(openai.APIStatusError, match="max_project_bytes") as full:
        await sdk.files.create(file=("b", b"x" * 1_900_000), purpose="batch")
    assert (full.value.status_code, full.value.code) == (413, "project_files_full")
    assert [path.stat().st_size for path in files_under(door.root)] == [1_900_000]


async def test_forms_that_are_wrong(door: FrontDoor) -> None:
    async def refused(
        fields: dict[str, str], files: dict[str, tuple[str, bytes]] | None = None, **options: object
    ) -> tuple[int, str]:
        sent = {"file": ("a", b"x")} if files is None else files
        answer = await door.client.post("/v1/files", data=fields, files=sent, headers=door.headers(), **options)
        return answer.status_code, answer.json()["error"]["code"]

    assert await refused({}) == (400, "missing_required_parameter")
    assert await refused({"purpose": "vision"}) == (400, "invalid_value")
    assert await refused({"purpose": "batch", "other": "1"}) == (400, "unknown_parameter")
    assert await refused({"purpose": "batch"}, {"document": ("a", b"x")}) == (400, "unknown_parameter")
    assert await refused({"purpose": "b" * 5000}) == (400, "invalid_form")
    expires = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}
    assert await refused({"purpose": "batch", **expires}) == (400, "invalid_value")

    async def raw(body: bytes, kind: str = "multipart/form-data; boundary=x") -> tuple[int, str]:
        answer = await door.client.post("/v1/files", content=body, headers={**door.headers(), "content-type": kind})
        return answer.status_code, answer.json()["error"]["code"]

    part = b'--x\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    purpose, file = part % (b"purpose", b"", b"batch"), part % (b"file", b'; filename="a"', b"x")
    assert await raw(purpose + file) == (400, "invalid_form")  # it ends too early
    assert await raw(purpose + file + file + b"--x--\r\n") == (400, "invalid_form")
    assert await raw(purpose + b"--x--\r\n") == (400, "missing_required_parameter")
    assert await raw(b"--x\r\n\r\nnameless\r\n" + purpose + b"--x--\r\n") == (400, "invalid_form")
    for name in ("n" * 5000, "n" * 60_000):
        upload = {"file": (name, b"x")}
        answer = await door.client.post("/v1/files", data={"purpose": "batch"}, files=upload, headers=door.headers())
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")
        assert "The name of the file is too long" in answer.json()["error"]["message"]
    assert await raw(b"{}", "application/json") == (400, "invalid_form")
    assert await raw(b"{}", "multipart/form-data") == (400, "invalid_form")
    assert files_under(door.root) == []
    async with door.services.database.read() as connection:
        assert (await connection.execute(files.select())).all() == []


async def test_the_file_may_come_before_its_purpose(door: FrontDoor) -> None:
    body = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="C:\\\\in\\\\a.jsonl"\r\n'
        b"Content-Type: application/json\r\n\r\nline\r\n--x\r\n"
        b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
    )
    headers = {**door.headers(), "content-type": "multipart/form-data; boundary=x"}
    answer = await door.client.post("/v1/files", content=body, headers=headers)
    assert (answer.status_code, answer.json()["filename"], answer.json()["bytes"]) == (200, "a.jsonl", 4)


async def test_a_client_that_leaves_in_the_middle_leaves_nothing(door: FrontDoor) -> None:
    async def half() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 600_000
        await eventually(lambda: bool(files_under(door.root)))
        raise OSError("gone")

    headers = {**door.headers(), "content-type": "multipart/form-data; boundary=x"}
    with pytest.raises((httpx.HTTPError, OSError)):
        await door.client.post("/v1/files", content=half(), headers=headers)
    await eventually(lambda: not files_under(door.root))


async def test_a_full_disk_is_said_and_leaves_nothing(
    door: FrontDoor, sdk: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gateway.files import content

    def full(self: object, data: bytes) -> None:
        raise StorageFull("No space left on device")

    monkeypatch.setattr(content._Written, "_write", full)
    with pytest.raises(openai.InternalServerError, match="no space left") as error:
        await upload(sdk, [line("a")])
    assert (error.value.status_code, error.value.code) == (503, "storage_full")
    assert files_under(door.root) == []


async def test_a_database_that_is_full_is_said_as_well(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    engine = door.services.database.engine

    def bounded(connection: Any, _: object) -> None:
        connection.execute("PRAGMA max_page_count = 1")  # SQLite makes of it the pages that there are

    # A database that may not grow, until a row of a file finds no page.
    event.listen(engine.sync_engine, "connect", bounded)
    await engine.dispose()
    taken = []

    async def fill() -> None:
        while True:
            taken.append(await upload(sdk, [line("a")]))

    try:
        with pytest.raises(openai.InternalServerError, match="no space left") as error:
            await fill()
    finally:
        event.remove(engine.sync_engine, "connect", bounded)
        await engine.dispose()
    assert (error.value.status_code, error.value.code) == (503, "storage_full")
    assert {path.name for path in files_under(door.root)} == set(taken)


async def test_the_input_of_a_running_batch_stays(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    batch = await begin(sdk, [line("a", "hanging")])
    with pytest.raises(openai.ConflictError, match=batch.id):
        await sdk.files.delete(batch.input_file_id)
    await sdk.batches.cancel(batch.id)


# The store, on both databases.


@pytest.fixture
def store(database: Database) -> FileStore:
    return FileStore(database, keep_days=1, max_project_bytes=10_000_000)


async def _put(store: FileStore, content: bytes, keep_s: int | None = None) -> str:
    writing = await store.write("project", "batch", bounded=True)
    for start in range(0, len(content), 100_000):
        await writing.add(content[start : start + 100_000])
    return (await writing.finish("name", keep_s)).id


async def test_content_in_either_database(store: FileStore) -> None:
    content = os.urandom(700_000)
    id = await _put(store, content)
    assert b"".join([piece async for piece in store.content.read(id)]) == content
    assert await store.remove("another", id) is False
    assert await store.remove("project", id) is True
    assert await store.get("project", id) is None


async def test_what_an_upload_left_is_purged(store: FileStore, database: Database) -> None:
    """A process that was killed in the middle leaves a row that nobody sees, and perhaps bytes."""
    kept = await _put(store, b"kept")
    writing = await store.write("project", "batch", bounded=True)
    await writing.add(b"x" * 300_000)
    over = await _put(store, b"over", keep_s=3600)
    assert await store.purge() == 0
    async with database.write() as connection:
        await connection.execute(files.update().where(~files.c.complete).values(created_ms=0))
        await connection.execute(files.update().where(files.c.id == over).values(expires_ms=now_ms()))
    assert await store.purge() == 2
    assert await store.purge() == 0
    assert [
        file.id for file in await store.page("project", purposes=["batch"], after=None, limit=9, newest_first=True)
    ] == [kept]
    async with database.read() as connection:
        chunks = (await connection.execute(file_chunks.select())).all()
    assert {row.file_id for row in chunks} <= {kept}


async def test_bytes_without_a_row_are_swept(tmp_path: Path) -> None:
    database = await Database.open(f"sqlite:///{tmp_path}/tierline.db")
    store = FileStore(database, keep_days=1, max_project_bytes=10_000_000)
    kept = await _put(store, b"kept")
    for name, age_s in (("file-lost", 7200), ("file-new", 0)):
        path = tmp_path / "files" / name
        path.write_bytes(b"x")
        os.utime(path, (time.time() - age_s,) * 2)
    assert await store.content.sweep() == 1
    assert {path.name for path in (tmp_path / "files").iterdir()} == {kept, "file-new"}
    await database.close()


async def test_lines_are_put_together_from_pieces() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"a\nb", b"", b"c\n\nxxxxxx", b"xxxxx\nd\n", b"yyyyyyyyyyyyy", b"\nlast"):
            await asyncio.sleep(0)
            yield piece

    assert [line async for line in lines_of(pieces(), 10)] == [b"a", b"bc", b"", None, b"d", None, b"last"]
