"""`tierline up` around the processes: the first key that it prints, the signals that end it, who may read its files."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from gateway.child import LogFile
from gateway.cli.events import Words
from gateway.cli.main import build
from gateway.cli.up import _first_admin_key, _first_key
from gateway.settings import load
from tests.conftest import open_to_others

COMMAND = [sys.executable, "-m", "gateway.cli", "up"]


@pytest.fixture
def config(tmp_path: Path, free_port: int) -> Path:
    """A platform file with nothing to start but the gateway."""
    (tmp_path / "policies").mkdir()
    policy = "version: 1\nname: default\nowner: me\nroutes: [{tier: small}]\n"
    (tmp_path / "policies/default.yaml").write_text(policy)
    path = tmp_path / "tierline.yaml"
    path.write_text(
        f"version: 1\nserver: {{port: {free_port}, drain_seconds: 1}}\nstorage: {{data_dir: var}}\n"
        "models: {m: {tier: small, backend: b}}\n"
        'backends: {b: {base_urls: ["http://127.0.0.1:1/v1"]}}\ncache: {enabled: false}\n'
    )
    return path


def tierline(config: Path, *words: str) -> str:
    done = CliRunner().invoke(build(words[0]), [*words, "--config", str(config)])
    assert done.exit_code == 0, done.output
    return done.stdout


@contextmanager
def running(config: Path, *options: str, ignoring: tuple[signal.Signals, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """`tierline up` once everything is up. It starts with these signals ignored, as a script's `command &` does."""

    def as_a_shell() -> None:
        os.umask(0o022)
        for number in ignoring:
            signal.signal(number, signal.SIG_IGN)

    process = subprocess.Popen(
        [*COMMAND, *options, "--config", str(config)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=as_a_shell,
    )  # fmt: skip
    watchdog = threading.Timer(120, process.kill)  # a test that reads its output must not wait for ever
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def wait_until_up(process: subprocess.Popen[str]) -> str:
    """All that was said until then."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if '"event": "up"' in line or "Content-Type" in line:
            return said
    raise AssertionError(f"it did not come up:\n{said}")


# --- the first admin key ---


def test_a_first_admin_key_is_made_and_never_printed(config: Path) -> None:
    said = []
    for _ in range(2):
        with running(config) as process:
            said.append(wait_until_up(process))
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
    path = config.parent / "var/admin-key"
    token = path.read_text().strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert all("admin key  in " in text and token not in text for text in said)
    (key,) = json.loads(tierline(config, "admin", "keys", "list", "--json"))
    assert (key["name"], key["role"], key["prefix"]) == ("first-admin-key", "write", token[:10])
    # Without its file there is nothing to say, and no other one is made.
    path.unlink()
    assert _first_admin_key(load(config)) is None
    assert not path.exists()


def test_without_an_admin_api_there_is_no_first_admin_key(config: Path) -> None:
    config.write_text(config.read_text() + "admin: {enabled: false}\n")
    with running(config) as process:
        assert "admin key" not in wait_until_up(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert not (config.parent / "var/admin-key").exists()
    assert json.loads(tierline(config, "admin", "keys", "list", "--json")) == []


# --- the first key ---


def banner(config: Path) -> str:
    settings = load(config)
    return Words(settings, "http://127.0.0.1:1", _first_key(settings), config).up()


def test_a_first_key_is_shown_by_the_start_that_makes_it(config: Path) -> None:
    """Later ones may print into a file or a journal."""
    text = banner(config)
    key_file = config.parent / "var/first-key"
    token = key_file.read_text().strip()
    assert f"first key  {token} " in text
    assert f"$(cat {key_file})" in text
    later = banner(config)
    assert token not in later
    assert f"first key  in {key_file}\n" in later
    assert f"$(cat {key_file})" in later


def test_a_first_key_is_shown_on_a_terminal_always(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    banner(config)
    master, slave = os.openpty()
    with os.fdopen(master), os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        text = banner(config)
        monkeypatch.undo()
    assert f"first key  {(config.parent / 'var/first-key').read_text().strip()} " in text


def test_the_line_to_paste_works_in_any_folder(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config.parent)
    text = banner(config)
    assert "(kept in var/first-key)" in text
    assert f"$(cat {config.parent}/var/first-key)" in text


def test_commands_are_printed_as_they_can_be_typed(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Path(sys.executable).with_name("tierline")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    text = banner(config)
    command = re.search(r"commands   (.+)", text)
    assert command is not None
    assert command[1] in (f"{installed} --help", f"{os.path.relpath(installed)} --help")
    done = subprocess.run(["sh", "-c", command[1]], capture_output=True, text=True, timeout=60, check=True)
    assert "Usage" in done.stdout
    monkeypatch.setenv("PATH", str(installed.parent))
    assert "commands   tierline --help\n" in banner(config)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("revoke", "first-key"), "has been revoked"),
        (("rotate", "first-key", "--overlap", "0"), "was rotated and has expired"),
    ],
)
def test_a_first_key_that_has_ended_is_not_shown(config: Path, words: tuple[str, ...], why: str) -> None:
    banner(config)
    token = (config.parent / "var/first-key").read_text().strip()
    tierline(config, "keys", *words)
    text = banner(config)
    assert f"first key  works no more: the API key {token[:9]}… {why}" in text
    assert f"keys create --name NAME --config {config}\n" in text
    assert "Bearer YOUR_KEY" in text
    assert token not in text
    assert "$(cat" not in text


def test_a_first_key_that_was_deleted_is_not_shown(config: Path) -> None:
    banner(config)
    (config.parent / "var/first-key").unlink()
    text = banner(config)
    assert f"first key  is not kept any more: {config.parent}/var/first-key is gone\n" in text
    assert "keys create --name NAME" in text
    assert "$(cat" not in text


def test_a_first_key_of_another_database_is_not_shown(config: Path) -> None:
    banner(config)
    (config.parent / "var/first-key").write_text("tl-" + "0" * 43 + "\n")
    assert "works no more: this API key is not known here" in banner(config)


def test_the_command_that_is_hinted_at_works(config: Path) -> None:
    """What `tierline up` really prints, and the line in it pasted into a shell."""
    tierline(config, "keys", "create", "--name", "other")
    with running(config) as process:
        said = wait_until_up(process)
        line = next(line for line in said.splitlines() if "a new key:" in line)
        command = line.partition("a new key:")[2].replace("NAME", "mine")
        made = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
        assert made.stdout.startswith("tl-")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert [key["name"] for key in json.loads(tierline(config, "keys", "list", "--json"))] == ["other", "mine"]


# --- signals ---


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_script_can_stop_what_it_started_in_the_background(config: Path, number: signal.Signals) -> None:
    """A shell without job control starts `command &` with SIGINT ignored, and the children inherit that."""
    with running(config, "--json", ignoring=(signal.SIGINT, signal.SIGQUIT)) as process:
        wait_until_up(process)
        process.send_signal(number)
        assert process.stdout is not None
        events = [json.loads(line)["event"] for line in process.stdout.read().splitlines()]
        assert process.wait(60) == 0
    assert events[0] == "stopping"
    assert events[-1] == "stopped"
    assert "killed" not in events


def test_nohup_outlives_its_terminal(config: Path) -> None:
    with running(config, "--json", ignoring=(signal.SIGHUP,)) as process:
        wait_until_up(process)
        status = Path(f"/proc/{process.pid}/status").read_text()
        (ignored,) = re.findall(r"^SigIgn:\s*([0-9a-f]+)$", status, re.MULTILINE)
        assert int(ignored, 16) >> (signal.SIGHUP - 1) & 1
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


# --- who may read ---


def test_what_a_run_leaves_is_its_owners_alone(config: Path) -> None:
    with running(config, "--json") as process:
        wait_until_up(process)
        data = config.parent / "var"
        assert open_to_others(data) == {}
        environment = {**os.environ, "TIERLINE_CONFIG": str(config)}
        (config.parent / "w.gguf").write_bytes(b"GGUF....")
        for words in (
            "keys create --name ci",
            "keys rotate ci",
            "cost report",
            f"models pull mine --from {config.parent}/w.gguf",
        ):
            subprocess.run(
                [sys.executable, "-m", "gateway.cli", *words.split()],
                env=environment, check=True, capture_output=True, umask=0o022,
            )  # fmt: skip
        assert open_to_others(data) == {}
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    written = {path.name for path in data.rglob("*")}
    assert {
        "tierline.db",
        "journal",
        "gateway.log",
        "up.json",
        "up.lock",
        "secret",
        "first-key",
        "admin-key",
        "models",
    } <= written
    assert open_to_others(data) == {}


def test_what_an_operator_opened_stays_open(config: Path) -> None:
    data = config.parent / "var"
    for folder in (data, data / "log", data / "run"):
        folder.mkdir()
        folder.chmod(0o755)
    for file in (data / "log/gateway.log", data / "run/up.json"):
        file.write_text("")
        file.chmod(0o644)
    with running(config, "--json") as process:
        wait_until_up(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    opened = {path.removeprefix(f"{data}/") for path in open_to_others(data)}
    assert opened == {str(data), "log", "run", "log/gateway.log", "run/up.json"}


def test_a_log_keeps_its_reader_when_it_is_turned_over(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "x.log", max_bytes=100)
    log.path.chmod(0o640)
    for number in range(20):
        log.write(f"line {number}")
    log.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["x.log", "x.log.1", "x.log.2", "x.log.3"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o640}


def test_a_schema_for_others_is_for_others(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gateway.cli", "policy", "schema", "--write", str(tmp_path / "schema.json")]
    subprocess.run(command, check=True, umask=0o022)
    assert stat.S_IMODE((tmp_path / "schema.json").stat().st_mode) == 0o644


@pytest.mark.parametrize("output", ["a reader that leaves", "a full disk"])
def test_it_runs_and_stops_as_ever_when_nobody_takes_its_output(config: Path, output: str, free_port: int) -> None:
    command = [*COMMAND, "--config", str(config)]
    if output == "a full disk":
        with open("/dev/full", "w") as full:
            process = subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE, text=True)
    else:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
    try:
        deadline = time.monotonic() + 60
        while not answers(free_port):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr is not None
        with process.stderr as said:
            assert said.read() == ""
        assert json.loads((config.parent / "var/run/up.json").read_text())["state"] == "stopped"
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health/live", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
