"""Tables of the command line: no number and no name is ever cut, in a terminal of any width or in a pipe."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from gateway.access.keys import KeyInfo, KeyLimits, create_key, list_keys
from gateway.access.secret import load_secret
from gateway.ledger.database import Database
from gateway.ledger.rows import LedgerRow, new_id

MODEL = "a-model-with-a-name-that-is-longer-than-the-terminal-is-wide-and-then-some-more-of-it"
DAY_MS = 86_400_000
COST_NANOUSD = 1_234_567_890_123_456_789
COST = "1234567890.123456789"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tierline.yaml"
    path.write_text("version: 1\nstorage: {data_dir: var}\n")
    return path


@pytest.fixture
def known(config: Path) -> list[KeyInfo]:
    """Keys, and ledger rows on two days with everything as long as it gets."""

    async def fill() -> list[KeyInfo]:
        database = await Database.open(f"sqlite:///{config.parent}/var/tierline.db")
        secret = load_secret(config.parent / "var/secret")
        limits = KeyLimits(2_000_000_000, 2_000_000_000, 2_000_000_000)
        for name in ("ci", "k" * 64):
            await create_key(
                database, secret, name=name, team="t" * 64, limits=limits, budget_nanousd=COST_NANOUSD,
                expires_ms=4_102_444_800_000, allowed_models=[MODEL],
            )  # fmt: skip
        await database.insert_rows(
            [
                LedgerRow(
                    attempt_id=new_id(), request_id=f"r{day}", attempt=1, ts_ms=day * DAY_MS, model=MODEL,
                    outcome="success", input_tokens=9_876_543_210, output_tokens=1_234_567, cost_nanousd=COST_NANOUSD,
                )
                for day in (20_000, 20_001)
            ]
        )  # fmt: skip
        found = await list_keys(database)
        await database.close()
        return found

    return asyncio.run(fill())


def in_terminal(config: Path, columns: int, *words: str) -> list[str]:
    """Lines of a command that runs in a real terminal of this width."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "FORCE_COLOR")}
    environment |= {"TERM": "xterm", "NO_COLOR": "1", "TIERLINE_CONFIG": str(config)}
    command = [sys.executable, "-m", "gateway.cli", *words]
    process = subprocess.Popen(command, stdout=terminal, stdin=terminal, stderr=subprocess.PIPE, env=environment)
    os.close(terminal)
    seen = b""
    while True:
        try:
            part = os.read(screen, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not part:
            break
        seen += part
    os.close(screen)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 0, complaint.decode()
    text = seen.decode().replace("\x1b[1m", "").replace("\x1b[0m", "")
    return [line.rstrip() for line in text.split("\r\n")]


def in_pipe(config: Path, *words: str) -> list[str]:
    """Lines of a command whose output goes elsewhere; a narrow `COLUMNS` is none of its business then."""
    command = [sys.executable, "-m", "gateway.cli", *words]
    environment = {**os.environ, "COLUMNS": "40", "TIERLINE_CONFIG": str(config)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    return done.stdout.splitlines()


def test_a_pipe_gets_whole_lines(config: Path, known: list[KeyInfo]) -> None:
    title, first, second, total = in_pipe(config, "cost", "report", "--by", "day,model")
    assert title.split() == ["day", "model", "requests", "input", "cached", "output", "cost", "$", "saved", "$"]
    assert first.split() == ["2024-10-04", MODEL, "1", "9,876,543,210", "0", "1,234,567", COST, "0.00"]
    assert second.split()[:2] == ["2024-10-05", MODEL]
    assert total.split()[-2:] == ["2469135780.246913578", "0.00"]
    listed = in_pipe(config, "keys", "list")
    for info, line in zip(known, listed[1:], strict=False):
        for part in (
            info.key_id,
            info.name,
            f"{info.prefix}…",
            "t" * 64,
            "2000000000",
            COST,
            MODEL,
            "2100-01-01 00:00",
        ):
            assert part in line


@pytest.mark.parametrize("columns", [100, 120, 200])
def test_a_terminal_folds_names_and_nothing_else(config: Path, known: list[KeyInfo], columns: int) -> None:
    lines = in_terminal(config, columns, "cost", "report", "--by", "day,model")
    assert max(map(len, lines)) <= columns
    for number in ("2024-10-04", "2024-10-05", "9,876,543,210", "1,234,567", COST, "2469135780.246913578"):
        assert any(number in line.split() for line in lines), number
    # The name is all there, in pieces of one column.
    start = lines[0].index("model")
    end = lines[0].index("requests")
    pieces = [line[start:end].strip() for line in lines[1:]]
    assert "".join(pieces).count(MODEL) == 2


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_a_terminal_too_narrow_gets_a_line_for_each_cell(config: Path, known: list[KeyInfo], columns: int) -> None:
    lines = in_terminal(config, columns, "keys", "list")
    for info in known:
        for title, value in (
            ("id", info.key_id),
            ("name", info.name),
            ("prefix", f"{info.prefix}…"),
            ("team", "t" * 64),
            ("rpm", "2000000000"),
            ("budget $", COST),
            ("models", MODEL),
            ("expires", "2100-01-01 00:00"),
            ("state", "active"),
        ):
            assert f"{title:<12}  {value}" in lines
    assert lines.count("") >= 2, "keys are apart"
    report = in_terminal(config, columns, "cost", "report", "--by", "day,model")
    assert f"cost $    {COST}" in report
    assert "cost $    2469135780.246913578" in report


def test_other_tables_fit_a_terminal_too(config: Path, free_port: int) -> None:
    narrow, wide = in_terminal(config, 80, "models", "list"), in_pipe(config, "models", "list")
    assert max(map(len, narrow)) <= 80 < max(map(len, wide))
    assert sorted("".join(narrow).replace(" ", "")) == sorted("".join(wide).replace(" ", ""))
    (config.parent / "policies").mkdir()
    policy = "version: 1\nname: default\nowner: me\nroutes: [{tier: small}]\n"
    (config.parent / "policies/default.yaml").write_text(policy)
    config.write_text(f"{config.read_text()}server: {{port: {free_port}}}\n")
    examined = in_terminal(config, 80, "doctor")
    assert max(map(len, examined)) <= 80
    assert "default in " in " ".join(examined), "the policies in force"
