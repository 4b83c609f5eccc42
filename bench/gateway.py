"""What the gateway adds to a request: throughput, latency, CPU per request and per streamed event.

A fast mock upstream answers at once, so whatever time passes is the gateway's. Measured side by side, in turns:
`direct` (no gateway, the limit), `passthrough` (a bare Python relay) and `tierline` with keys, limits, budget, ledger
and metrics on and the cache off; with `--peers` other gateways, which it installs (bench/peers.py); or any one by
`--command` and `--url`. With two cores or more the gateway
has one to itself and mock and load generator share another. CPU is user and system time of the gateway's processes.

    python -m bench.gateway [--runs 3] [--seconds 4] [--peers litellm,portkey,tensorzero,nginx]
    python -m bench.gateway --name peer --command "peer serve --upstream {upstream}" --url http://127.0.0.1:4000/v1
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench import peers
from bench.report import Row, report

PACED = "mock,chunks=64,interval_ms=5"
BURST = "mock,chunks=64"
RAW = {"plain": "mock", "paced": PACED, "burst": BURST}  # as the mock knows them
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant that answers briefly."},
    {"role": "user", "content": "Name three rivers of Europe and say which countries each of them flows through."},
]
CONFIG = """\
version: 1
server: {{host: 127.0.0.1, port: {port}, log: {{level: warning}}}}
storage: {{data_dir: {data_dir}}}
policies_dir: {policies}
models:
  mock: {{tier: small, backend: mock, price: {price}}}
  paced: {{tier: small, backend: mock, upstream_model: "{paced}", price: {price}}}
  burst: {{tier: small, backend: mock, upstream_model: "{burst}", price: {price}}}
backends:
  mock: {{base_urls: ["{upstream}"], max_outstanding: 1000}}
cache: {{enabled: false}}
"""
PRICE = '{version: bench-1, input_usd_per_million: "0.10", output_usd_per_million: "0.40"}'


@dataclasses.dataclass(frozen=True)
class Target:
    """A system under test: where it listens, what a request needs, and its process (None: no gateway)."""

    name: str
    url: str
    headers: Sequence[str]
    models: Mapping[str, str]  # the public names for plain, paced and burst
    pid: int | None

    def cpu_s(self) -> float:
        """CPU seconds used so far by the process and its children."""
        if self.pid is None:
            return 0.0
        process = psutil.Process(self.pid)
        times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
        return sum(t.user + t.system for t in times)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def process(command: Sequence[str], core: int, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a command on one core, if the machine has that many; stop it at the end."""
    cores = os.sched_getaffinity(0)
    chosen = {sorted(cores)[core]} if len(cores) > core else cores
    started = subprocess.Popen(command, text=True, preexec_fn=lambda: os.sched_setaffinity(0, chosen), **options)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(15)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        if started.stdout is not None:
            started.stdout.close()


def answers(url: str, headers: Sequence[str], model: str) -> bool:
    """Whether a chat request gets its answer."""
    body = json.dumps({"model": model, "messages": MESSAGES}).encode()
    request = urllib.request.Request(url + "/chat/completions", body, {"content-type": "application/json"})
    for header in headers:
        request.add_header(*header.split(": ", 1))
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(json.load(answer)["choices"])
    except OSError:
        return False


@contextlib.contextmanager
def gateway(
    name: str, command: Sequence[str], url: str | None, headers: Sequence[str], models: Mapping[str, str]
) -> Iterator[Target]:
    """Start a gateway and wait until it answers. Without `url`, it prints that.

    Raises RuntimeError with its output if it does not answer.
    """
    with tempfile.TemporaryFile("w+") as output, process(command, 0, stdout=output, stderr=output) as started:
        until = time.monotonic() + 60
        while not (url and answers(url, headers, models["plain"])):
            if url is None:
                output.seek(0)
                printed = [line for line in output.read().splitlines() if line.startswith("http")]
                url = printed[0].rstrip("/") if printed else None
            if started.poll() is not None or time.monotonic() > until:
                output.seek(0)
                raise RuntimeError(f"{name} does not answer at {url}:\n{output.read()[-4000:]}")
            time.sleep(0.1)
        yield Target(name, url, headers, models, started.pid)


@contextlib.contextmanager
def tierline(upstream: str, directory: Path) -> Iterator[Target]:
    """`tierline gateway` with everything on but the cache, in a data directory of its own."""
    import policies

    port = free_port()
    config = directory / "tierline.yaml"
    values = {"data_dir": directory / "var", "policies": Path(policies.__file__).parent, "upstream": upstream}
    config.write_text(CONFIG.format(port=port, price=PRICE, paced=PACED, burst=BURST, **values), encoding="utf-8")
    command = [
        sys.executable,
        "-c",
        "from gateway.cli import main; main()",
        "keys",
        "create",
        "--config",
        str(config),
        "--json",
    ]
    command += ["--rpm", "100000000", "--tpm", "2000000000", "--parallel", "100000", "--budget-usd", "1000000"]
    key = json.loads(subprocess.check_output(command, text=True))["key"]
    serve = [sys.executable, "-m", "gateway", "--config", str(config)]
    models = {"plain": "mock", "paced": "paced", "burst": "burst"}
    with gateway("tierline", serve, f"http://127.0.0.1:{port}/v1", [f"authorization: Bearer {key}"], models) as target:
        yield target


@contextlib.contextmanager
def peer(name: str, upstream: str, directory: Path) -> Iterator[Target]:
    """Another gateway, installed under var/peers."""
    port, at = free_port(), directory / name
    at.mkdir()
    start = peers.PEERS[name](Path("var/peers").absolute(), at, upstream, port, RAW)
    url = None if start.prints_url else f"http://127.0.0.1:{port}/v1"
    with gateway(name, start.command, url, start.headers, start.models) as target:
        yield target


@contextlib.contextmanager
def targets(given: argparse.Namespace, upstream: str, directory: Path) -> Iterator[list[Target]]:
    """All systems, running beside each other; an idle one costs nothing."""
    with contextlib.ExitStack() as stack:
        found = [Target("direct", upstream, [], RAW, None)]
        port = free_port()
        bare = [sys.executable, "-m", "bench.passthrough", upstream, str(port)]
        found.append(stack.enter_context(gateway("passthrough", bare, f"http://127.0.0.1:{port}/v1", [], RAW)))
        found += [stack.enter_context(peer(name, upstream, directory)) for name in given.peers]
        if given.command:
            command = shlex.split(given.command.replace("{upstream}", upstream))
            found.append(stack.enter_context(gateway(given.name, command, given.url, given.header, RAW)))
        else:
            found.append(stack.enter_context(tierline(upstream, directory)))
        yield found


def run(target: Target, what: str, connections: int, seconds: float) -> dict[str, Any]:
    """One run of the load generator. `cpu_s` is what the gateway used. Raises RuntimeError if any request failed."""
    body = {"model": target.models[what], "messages": MESSAGES, "temperature": 0.7, "max_tokens": 128}
    if what != "plain":
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    command = [sys.executable, "-m", "bench.load", target.url, "--body", json.dumps(body)]
    command += ["--connections", str(connections), "--seconds", str(seconds)]
    command += [f"--header={header}" for header in target.headers]
    before = target.cpu_s()
    with process(command, 1, stdout=subprocess.PIPE) as load:
        output, _ = load.communicate()
    result: dict[str, Any] = json.loads(output)
    if result["errors"]:
        raise RuntimeError(f"{target.name}: {result['errors']} requests failed; the last one: {result['last_error']}")
    return {**result, "cpu_s": target.cpu_s() - before}


def measure(systems: Sequence[Target], runs: int, seconds: float) -> list[Row]:
    """Every system in turn, `runs` times; figures of one system come from different moments of a busy machine."""
    found: dict[tuple[str, str, str, str], list[float]] = {}

    def note(metric: str, target: Target, setting: str, unit: str, value: float) -> None:
        found.setdefault((metric, target.name, setting, unit), []).append(value)

    for target in systems:
        run(target, "plain", 16, min(1.0, seconds))  # warm-up: connections, caches, lazy imports
        run(target, "burst", 4, min(1.0, seconds))
    for _ in range(runs):
        direct: dict[str, dict[str, float]] = {}
        for target in systems:
            one = run(target, "plain", 1, seconds)
            many = run(target, "plain", 64, seconds)
            paced = run(target, "paced", 16, seconds)
            burst = run(target, "burst", 64, seconds)
            note("requests_per_second", target, "connections=1", "1/s", one["requests"] / one["wall_s"])
            note("requests_per_second", target, "connections=64", "1/s", many["requests"] / many["wall_s"])
            note("events_per_second", target, "streams=64 burst", "1/s", burst["events"] / burst["wall_s"])
            if target.pid is None:
                direct = {"latency": one["latency_us"], "first": paced["first_delay_us"]}
                for q in ("p50", "p99"):
                    note(f"latency_{q}", target, "connections=1", "ms", direct["latency"][q] / 1000)
                    note(f"first_event_{q}", target, "streams=16 paced", "ms", direct["first"][q] / 1000)
                continue
            for q in ("p50", "p99"):
                added = (one["latency_us"][q] - direct["latency"][q]) / 1000
                note(f"added_latency_{q}", target, "connections=1", "ms", added)
                added = (paced["first_delay_us"][q] - direct["first"][q]) / 1000
                note(f"added_first_event_{q}", target, "streams=16 paced", "ms", added)
            note("cpu_per_request", target, "connections=64", "us", many["cpu_s"] / many["requests"] * 1e6)
            note("cpu_per_event", target, "streams=16 paced", "us", paced["cpu_s"] / paced["events"] * 1e6)
            note("cpu_per_event", target, "streams=64 burst", "us", burst["cpu_s"] / burst["events"] * 1e6)
            note("memory_rss", target, "after the run", "MB", psutil.Process(target.pid).memory_info().rss / 1e6)
    rows = [Row.of(*key, values) for key, values in found.items()]
    return sorted(rows, key=lambda row: (row.metric, row.setting))


def main() -> None:
    arguments = argparse.ArgumentParser(description="Measure what a gateway adds, beside nothing and a bare relay")
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--seconds", type=float, default=4.0, help="per measurement")
    arguments.add_argument("--name", default="peer", help="what to call the gateway of --command")
    arguments.add_argument("--command", help="how to start another gateway; {upstream} is replaced by the mock's URL")
    arguments.add_argument("--url", help="its base URL")
    arguments.add_argument("--header", action="append", default=[], help="NAME: VALUE for its requests")
    arguments.add_argument("--peers", default="", help=f"other gateways, of {', '.join(peers.PEERS)}; comma-separated")
    given = arguments.parse_args()
    given.peers = [name for name in given.peers.split(",") if name]
    if unknown := set(given.peers) - peers.PEERS.keys():
        arguments.error(f"no such peer: {', '.join(sorted(unknown))}")
    if given.command and not given.url:
        arguments.error("--command needs --url")
    with (
        tempfile.TemporaryDirectory() as directory,
        process([sys.executable, "-m", "bench.mock_upstream"], 1, stdout=subprocess.PIPE) as mock,
    ):
        assert mock.stdout is not None
        upstream = mock.stdout.readline().strip()
        with targets(given, upstream, Path(directory)) as systems:
            rows = measure(systems, given.runs, given.seconds)
    report("gateway", rows)


if __name__ == "__main__":
    main()
