"""A policy edited while `tierline up` runs: its terminal says whether the edit counts."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from gateway.cli.events import FirstKey, Words
from gateway.logs import setup
from gateway.policy_news import PolicyNews
from gateway.processes import gateway_specs
from gateway.settings import LogSettings, Settings
from gateway.supervisor import Event
from tests.gateway.front_door import POLICY, FrontDoor, eventually

BAD = "policies refused, the last good set stays in force: p/default.yaml:5:1: unknown key 'rouets'."


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root, policies = logging.getLogger(), logging.getLogger("tierline.policies")
    before = root.handlers[:], root.level, policies.level
    yield
    root.handlers[:], root.level, policies.level = before


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("level", ["info", "error"])
async def test_every_reload_is_heard_from_the_log(
    door: FrontDoor,
    monkeypatch: pytest.MonkeyPatch,
    restored_logging: None,
    form: Literal["text", "json"],
    level: Literal["info", "error"],
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    setup(LogSettings(format=form, level=level))
    news = PolicyNews()

    def heard() -> list[str]:
        return [said for line in written.getvalue().splitlines() if (said := news(line))]

    door.write_policy(POLICY.replace("routes:", "rouets:"))
    await eventually(lambda: "refused" in written.getvalue())
    (refused,) = heard()
    assert refused.startswith("policies refused, ")
    assert "default.yaml:" in refused
    assert "Did you mean 'routes'?" in refused
    door.write_policy(POLICY)
    await eventually(lambda: "policies in force" in written.getvalue())
    assert heard()[-1] == f"policies in force, version {door.services.policies.version}"


def test_what_several_gateways_say_is_news_once() -> None:
    news = PolicyNews()
    first, again = f"2026-11-30T12:00:00.000Z error   {BAD}", f"2026-11-30T12:00:00.100Z error   {BAD}"
    good = "2026-11-30T12:00:09.000Z info    policies in force, version 0123456789ab"
    assert [news(line) for line in (first, again, good, good, first)] == [BAD, None, good[33:], None, BAD]
    assert news(good) == good[33:], "the same version as before the refusal is news again"


def test_a_roll_back_is_news_once_until_it_is_tried_again() -> None:
    news = PolicyNews()
    back = "policy next@0123456789ab is rolled back to default: error_rate: 100.00 % new"
    again = "policy next@0123456789ab is tried again"
    said = [f"2026-11-30T12:00:00.000Z error   {back}", f"2026-11-30T12:00:00.100Z info    {again}"]
    as_json = '{"level": "error", "event": "' + back + '"}'
    heard = [news(line) for line in (said[0], said[0], as_json, said[1], said[1], as_json)]
    assert heard == [back, None, None, again, None, back]
    assert news("2026-11-30T12:00:00.000Z info    policy next@0123456789ab goes to 50 %") is None


@pytest.mark.parametrize(
    "line",
    ["", "{", '{"event": 3, "x": "policies "}', '{"event": "policies reloaded"}', f"prompt: {BAD}", "policies refused"],
)
def test_other_lines_are_no_news(line: str) -> None:
    assert PolicyNews()(line) is None


def test_gateways_share_their_news(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {"server": {"workers": 2}, "storage": {"redis_url": "redis://r", "data_dir": str(tmp_path)}}
    )
    one, two = gateway_specs(settings, tmp_path / "tierline.yaml")
    assert one.notable is two.notable is not None


def test_it_is_a_line_on_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Words(Settings(), "http://x", FirstKey(tmp_path, None)).print(Event("said", "gateway", {"said": BAD}))
    assert capsys.readouterr().out.split(maxsplit=1) == ["gateway", BAD + "\n"]
