"""Every policy version that was in force is kept, by whatever process, and can be read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.mock_upstream import MockUpstream
from gateway.ledger.database import Database
from gateway.ledger.policy_versions import PolicyVersion, UnknownVersion, find, history, keep, texts
from gateway.policy_record import PolicyRecord
from policies.watch import PolicyStore
from tests.gateway.admin_door import admin, refused
from tests.gateway.front_door import POLICY, FrontDoor, configuration, front_door


def version(name: str, version: str, moment: int, text: str = "x") -> PolicyVersion:
    return PolicyVersion(
        name=name, version=version, file=f"{name}.yaml", text=text, seen_by="h/1", first_seen_ms=moment,
        last_seen_ms=moment,
    )  # fmt: skip


async def test_versions_are_kept_once_and_seen_last(database: Database) -> None:
    await keep(database, [version("a", "aaaa1111", 10), version("b", "bbbb1111", 10)])
    await keep(database, [version("a", "aaaa2222", 20)])
    await keep(database, [version("a", "aaaa1111", 30, "another text would be another version")])
    await keep(database, [version("a", "aaaa1111", 5)])  # a process that was slow to say so
    found = await history(database, "a")
    assert [(one.version, one.first_seen_ms, one.last_seen_ms, one.text) for one in found] == [
        ("aaaa1111", 10, 30, "x"),
        ("aaaa2222", 20, 20, "x"),
    ]
    assert len(await history(database)) == 3
    assert (await find(database, "a", "aaaa2")).version == "aaaa2222"
    for name, prefix, words in (("a", "aaaa", "2 versions"), ("a", "cccc", "no version"), ("a", "aa", "too short")):
        with pytest.raises(UnknownVersion, match=words):
            await find(database, name, prefix)
    assert set(await texts(database, [("a", "aaaa2222"), ("b", "aaaa2222"), ("c", "x")])) == {("a", "aaaa2222")}


async def test_an_outage_loses_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = await Database.open(f"sqlite:///{tmp_path}/t.db")
    folder = tmp_path / "policies"
    folder.mkdir()
    (folder / "a.yaml").write_text(POLICY)
    store = PolicyStore(folder)
    record = PolicyRecord(database, store, 1)
    with monkeypatch.context() as patched:

        async def away(*_: object) -> None:
            raise OSError("the database is away")

        patched.setattr("gateway.policy_record.keep", away)
        record.saw(store.current)
        assert not await record._write()
        (folder / "a.yaml").write_text(POLICY + "description: edited meanwhile\n")
        store.reload()
        record.saw(store.current)
        assert not await record._write()
    assert await record._write()
    assert {one.text for one in await history(database)} == {POLICY, POLICY + "description: edited meanwhile\n"}
    await database.close()


async def test_a_gateway_keeps_what_comes_into_force(tmp_path: Path, upstream: MockUpstream) -> None:
    async with front_door(tmp_path, configuration({"up": upstream})) as door:
        first = door.services.policies.current.policies[0]
        served = await door.chat()
        assert served.headers["x-tierline-policy"] == f"default@{first.version}"
        door.write_policy(POLICY.replace("tier: small", "tier: medium"))
        door.services.policies.reload()
        second = door.services.policies.current.policies[0]
        assert second.version != first.version
        assert door.services.policy_record is not None
        await door.services.policy_record._write()
        await admin_reads(door, first.version, second.version)


async def admin_reads(door: FrontDoor, first: str, second: str) -> None:
    someone = await admin(door)
    listed = (await someone.get("policies/default/versions"))["data"]
    assert {line["version"] for line in listed} == {first, second}
    assert all("text" not in line for line in listed)
    whole = await someone.get(f"policies/default/versions/{first}")
    assert whole["text"] == POLICY
    assert whole["file"] == "default.yaml"
    assert refused(await someone.ask("GET", "policies/default/versions/0000")) == (404, "not_found")
    assert refused(await someone.ask("GET", "policies/nobody/versions")) == (404, "not_found")
