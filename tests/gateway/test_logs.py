"""The log: one line per event whatever the values hold, as text and as JSON, and no secret in it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from gateway import logs
from gateway.settings import LogSettings

FORGED = "a\r\n2026-11-30T00:00:00.000Z info    request finished\x0b\x0c\x1b[2J\x85\u2028\u2029b"


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def written(capsys: pytest.CaptureFixture[str], form: str) -> list[str]:
    """What the log holds, as a reader that knows every line break would see it."""
    logs.log(logging.INFO, "request finished", model=FORGED, policies=[FORGED], status=200, none=None)
    logging.getLogger("elsewhere").warning("the answer of %s: %s", "b", FORGED)
    lines = capsys.readouterr().out.splitlines()
    assert all("\x1b" not in line for line in lines), form
    return lines


def test_as_text_an_event_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(LogSettings(format="text"))
    lines = written(capsys, "text")
    assert len(lines) == 2
    assert r" info    request finished model=a\r\n2026-11-30T00:00:00.000Z info" in lines[0]
    assert lines[0].endswith(" status=200")
    assert r"warning the answer of b: a\r\n2026" in lines[1]


def test_as_json_an_event_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup(LogSettings(format="json"))
    logs.log(logging.INFO, "request finished", model="a\r\nb", status=200)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["model"] == "a\r\nb"


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_text_that_cannot_be_encoded_is_written_all_the_same(
    form: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs.setup(LogSettings.model_validate({"format": form}))
    logs.log(logging.INFO, "request finished", model="m\ud800", status=200)
    found = capfd.readouterr()
    assert "m\\ud800" in found.out.replace("\\\\", "\\")
    assert "200" in found.out
    assert not found.err


def test_a_traceback_is_indented_so_that_none_of_its_lines_looks_like_an_event(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.setup(LogSettings(format="text"))
    try:
        raise ValueError("no\n2026-11-30T00:00:00.000Z info    forged")
    except ValueError:
        logging.getLogger("tierline").error("it failed", exc_info=sys.exc_info())
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.endswith("error   it failed")
    assert rest[0] == "  Traceback (most recent call last):"
    assert rest[-1].endswith("forged")
    assert all(line.startswith("  ") for line in rest)
