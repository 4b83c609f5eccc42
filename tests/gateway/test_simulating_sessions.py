"""Conversations in `policy simulate`: what a gateway had on record, replayed, against what a gateway then does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bench.mock_upstream import MockUpstream
from gateway.simulating.run import simulate
from policies.load import PolicySet, load
from policies.simulation.report import Report
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door

POLICY = """\
version: 1
name: default
owner: tests
routes:
  - {name: now, when: '"now=yes" in tags', tier: small, sticky: false}
  - {name: big, when: '"size=big" in tags', tier: large}
  - {name: rest, tier: small}
cache: {mode: "off"}
"""
# Turns of two conversations, in turns: what a rule wants of each.
TURNS = (
    ("a", ""), ("b", "size=big"), ("a", "size=big"), ("b", ""), ("a", ""), ("b", "now=yes"), ("a", ""), ("b", ""),
    ("a", ""), ("b", "size=big"), ("a", ""), ("b", ""), ("a", "size=big"), ("b", ""), ("a", ""), ("b", ""), ("a", ""),
)  # fmt: skip
MODELS = {
    "tiny": {"tier": "small", "backend": "up", "upstream_model": "mock", "price": PRICE},
    "tall": {"tier": "large", "backend": "up", "upstream_model": "mock", "price": PRICE},
}
KEPT = "session: {}\n"
LOOSE = "session: {downgrade_after: 2}\n"


async def play(door: FrontDoor) -> list[tuple[str, str]]:
    """Every turn: the tier that answered, and what became of it."""
    found = []
    for conversation, tag in TURNS:
        headers = {"x-tierline-session": conversation} | ({"x-tierline-tags": tag} if tag else {})
        answer = await door.chat("auto", headers=headers)
        assert answer.status_code == 200, answer.text
        found.append((answer.headers["x-tierline-tier"], answer.headers.get("x-tierline-session", "")))
    return found


def policies(root: Path, name: str, session: str) -> PolicySet:
    (root / name).mkdir(exist_ok=True)
    (root / name / "default.yaml").write_text(POLICY + session)
    return load(root / name, ["small", "large"], MODELS)


async def replayed(door: FrontDoor, old: PolicySet, new: PolicySet) -> Report:
    await door.rows()
    since = datetime.now(UTC) - timedelta(minutes=10)
    report, unusable = await simulate(door.services.settings, door.services.database, old, new, since, None)
    assert not unusable
    return report


def mix(report: Report, side: str) -> Mapping[str, int]:
    counts = {one.name: round(getattr(one, side).value * len(TURNS)) for one in report.tiers}
    return {tier: count for tier, count in counts.items() if count}


def switches(played: list[tuple[str, str]]) -> int:
    return sum(what in ("upgraded", "downgraded") for _, what in played)


@pytest.mark.parametrize(("before", "after"), [(KEPT, LOOSE), (LOOSE, KEPT), (KEPT, ""), (LOOSE, LOOSE)])
async def test_conversations_go_where_they_then_go(
    tmp_path: Path, upstream: MockUpstream, before: str, after: str
) -> None:
    document = configuration({"up": upstream}, MODELS)
    (tmp_path / "first").mkdir()
    async with front_door(tmp_path / "first", document, policy=POLICY + before) as door:
        played = await play(door)
        old, new = policies(tmp_path, "old", before), policies(tmp_path, "new", after)
        report = await replayed(door, old, new)
    (tmp_path / "then").mkdir()
    async with front_door(tmp_path / "then", document, policy=POLICY + after) as door:
        happened = await play(door)
    assert report.reproduced == 1.0
    for side, tiers in (("old", played), ("new", happened)):
        assert mix(report, side) == Counter(tier for tier, _ in tiers)
    changed = sum(then != now for (then, _), (now, _) in zip(happened, played, strict=True))
    assert report.changed == changed
    (note,) = [note for note in report.notes if note.startswith("conversations were followed")]
    assert f"{switches(happened) if after else 0:,} switches of tier (now {switches(played):,})" in note


async def test_turns_whose_conversation_is_not_on_record_are_said_to_be_decided_alone(
    tmp_path: Path, upstream: MockUpstream
) -> None:
    async with front_door(tmp_path, configuration({"up": upstream}, MODELS), policy=POLICY) as door:
        await play(door)
        report = await replayed(door, policies(tmp_path, "old", ""), policies(tmp_path, "new", KEPT))
    assert report.changed == 0
    assert any(
        note.startswith(f"{len(TURNS)} requests of policies with 'session' are decided alone") for note in report.notes
    )
