"""The file `secret` of the data folder: made once, and never made anew where keys already depend on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.access.keys import SecretMismatch, open_secret
from gateway.ledger.database import Database
from tests.gateway.commands import configuration, tierline


@pytest.fixture
def prepared(tmp_path: Path, free_port: int) -> Path:
    config = configuration(tmp_path, port=free_port)
    done = tierline("up", "--prepare-only", "--config", str(config))
    assert done.returncode == 0, done.stderr
    return config


@pytest.mark.parametrize(
    "command",
    [("up", "--prepare-only"), ("keys", "create", "--name", "x"), ("admin", "keys", "create", "--name", "x")],
)
def test_a_missing_secret_is_asked_for_and_not_made_anew(prepared: Path, command: tuple[str, ...]) -> None:
    secret = prepared.parent / "data/secret"
    kept = secret.read_text()
    secret.unlink()
    for _ in range(2):
        refused = tierline(*command, "--config", str(prepared))
        assert refused.returncode == 1
        assert f"{secret} is missing" in refused.stderr
        assert not secret.exists(), "a wrong one would look like the right one"
    secret.write_text(kept)
    assert tierline(*command, "--config", str(prepared)).returncode == 0


async def test_the_gateway_makes_none_either(prepared: Path) -> None:
    path = prepared.parent / "data/secret"
    database = await Database.open(f"sqlite+aiosqlite:///{path.parent}/tierline.db")
    try:
        known = (await open_secret(database, path)).digest("x")
        path.rename(path.with_name("aside"))
        with pytest.raises(SecretMismatch, match="is missing"):
            await open_secret(database, path)
        assert not path.exists()
        path.with_name("aside").rename(path)
        assert (await open_secret(database, path)).digest("x") == known
    finally:
        await database.close()
