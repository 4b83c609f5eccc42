"""What `tierline up` would start, and what it refuses before it starts anything."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from gateway.listeners import check_ports
from gateway.lock import FileLock
from gateway.processes import (
    CannotStart,
    available_cores,
    default_threads,
    listening_url,
    process_specs,
    served_name,
)
from gateway.settings import load
from tests.gateway.commands import configuration, tierline


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


@pytest.mark.parametrize("command", [("up",), ("up", "--prepare-only"), ("doctor",)])
def test_a_start_without_policies_is_refused(tmp_path: Path, command: tuple[str, ...], free_port: int) -> None:
    config = configuration(tmp_path, port=free_port)
    (tmp_path / "policies").rename(tmp_path / "polices")
    done = tierline(*command, "--config", str(config))
    assert done.returncode == 1
    assert "policies" in done.stdout + done.stderr
    assert not (tmp_path / "data").exists(), "nothing was made"


@pytest.mark.parametrize("command", [("up",), ("up", "--prepare-only"), ("doctor",)])
def test_a_host_that_cannot_be_resolved_is_blamed_with_its_line(
    tmp_path: Path, command: tuple[str, ...], free_port: int
) -> None:
    config = configuration(tmp_path, port=free_port)
    config.write_text(config.read_text().replace("server: {", "server: {host: a..invalid, "))
    done = tierline(*command, "--config", str(config))
    assert done.returncode == 1
    said = " ".join((done.stdout + done.stderr).split())
    assert "server.host: the host 'a..invalid' cannot be resolved" in said
    assert ":2:10: " in said


def test_a_host_of_another_machine_is_blamed_and_not_the_port(tmp_path: Path, free_port: int) -> None:
    config = configuration(tmp_path, port=free_port)
    config.write_text(config.read_text().replace("server: {", "server: {host: 192.0.2.1, "))
    done = tierline("up", "--config", str(config))
    assert done.returncode == 1
    assert "server.host: '192.0.2.1' is no address of this machine" in done.stderr
    assert ":2:10: " in done.stderr


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
    engine = "{model: w.gguf, port: 9101, threads: 3, kv_cache_bytes: 1048576, precision: float32, "
    engine += "kv_host_bytes: 2097152, kv_host_dir: /fast, kv_redis_bytes: 3145728, "
    engine += "speculative: draft, draft_model: s, task: embed, max_batch_size: 4, max_wait_ms: 7, "
    engine += "lora: {tuned: loras/a, other: /b}, lora_dir: loras, max_loras: 3, max_lora_rank: 8}"
    config = configuration(tmp_path, port=9100, engine=engine, extra="cache: {threads: 2, max_wait_ms: 1.5}\n")
    settings = load(config)
    specs = {spec.name: spec for spec in process_specs(settings, config, {"e": tmp_path / "w.gguf"}, {"e": Path("d")})}
    line = " ".join(specs["engine-e"].argv)
    for part in ("-m engine", "--served-name m", "--port 9101", "--threads 3", "--kv-cache-bytes 1048576",
                 "--kv-host-bytes 2097152", "--kv-host-dir /fast", "--kv-redis-bytes 3145728",
                 "--kv-redis-ttl-seconds 3600",
                 "--precision float32", "--speculative draft", "--num-speculative-tokens 4", "--draft-model d",
                 "--task embed", "--max-batch-size 4", "--max-wait-ms 7.0",
                 f"--lora tuned={tmp_path}/loras/a", "--lora other=/b", f"--lora-dir {tmp_path}/loras",
                 "--max-loras 3", "--max-lora-rank 8",
                 f"--model {tmp_path}/w.gguf", f"--data-dir {tmp_path}/data"):  # fmt: skip
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
    config.write_text(text.replace("{model: w.gguf}", "{model: w.gguf, lora: {n: loras/n}}"))
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
