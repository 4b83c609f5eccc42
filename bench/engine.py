"""The bundled engine over HTTP, with other engines beside it in the same run.

    python -m bench.engine [--peers llamacpp,vllm] [--streams 1,8,32] [--runs 3] [--seconds 60] [--threads 2]

Every stream sends its own random prompt of 128 token ids and reads 128 tokens (`ignore_eos`), so no prefix is shared
and no answer ends early: tokens per second, time to first token, time per token. Then a prompt of 512 tokens alone, and
another that shares its first 512. The load generator runs beside the server on the same machine. Peers are installed on
first use (`bench/engine_peers.py`); one that cannot be installed or started is left out, and the run says why.
transformers generates the same batch without HTTP, with weights dequantised from the same file, each data type in a
process of its own (bfloat16 where the processor multiplies it). `bench/engine_checks.py` adds quality and overhead.

The figures of CPU time per token hold on a busy machine, too; the others want a quiet one. Each system is measured for
`--seconds` at most: on a slow machine there are fewer runs, and what would not be done in time is left out, and said to
be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import aiohttp
import psutil

from bench import engine_peers
from bench.report import Row, report

PROMPT_TOKENS = 128
ANSWER_TOKENS = 128
DEFAULT_MODEL = Path("var/models/smollm2-135m")
WARM_UP_TOKENS = 4
LONG_PROMPT = 512
NEW_TOKENS = 16  # after a long prompt that is known
READY_SECONDS = 180
VOCABULARY = range(1000, 40_000)  # ordinary tokens of every vocabulary that matters here


class Budget:
    """The time for one system's runs. A run of twice the streams is taken to last twice as long, at most."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds
        self._per_stream = 0.0  # seconds, of the last run

    def allows(self, streams: int) -> bool:
        """Whether a run of so many streams is sure to end in time. The first one always may begin."""
        return time.perf_counter() + self._per_stream * streams < self._end

    def spent(self, streams: int, seconds: float) -> None:
        self._per_stream = seconds / streams

    def runs(self, system: str, streams: int, most: int) -> Iterator[int]:
        """Numbers of runs, `most` at most, as long as there is time; tells of a setting that gets none."""
        for run in range(most):
            if not self.allows(streams):
                if run == 0:
                    print(f"{system}: no time left for {streams} streams", file=sys.stderr)
                return
            start = time.perf_counter()
            yield run
            self.spent(streams, time.perf_counter() - start)


@dataclass(slots=True)
class Series:
    """Values by metric, one per run."""

    system: str
    setting: str
    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, metric: str, unit: str, value: float) -> None:
        self.values.setdefault((metric, unit), []).append(value)

    def rows(self) -> list[Row]:
        return [Row.of(metric, self.system, self.setting, unit, v) for (metric, unit), v in self.values.items()]


class Server(Protocol):
    """An engine that listens on `url`."""

    url: str

    async def wait_ready(self, session: aiohttp.ClientSession) -> float:
        """Seconds from its start until it serves. Raises RuntimeError when it ends first, or takes too long."""
        ...

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far, by part."""
        ...


async def _wait_ready(
    process: subprocess.Popen[str], url: str, session: aiohttp.ClientSession, started: float
) -> float:
    while time.perf_counter() < started + READY_SECONDS:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with session.get(url) as response:
                if response.status == 200:
                    return time.perf_counter() - started
        if process.poll() is not None:
            raise RuntimeError(f"the engine ended with exit code {process.returncode}")
        await asyncio.sleep(0.05)
    raise RuntimeError(f"the engine is not ready after {READY_SECONDS} s")


class EngineProcess:
    """`python -m engine` on a free port, ready to serve when entered."""

    def __init__(self, model: Path, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "engine", "--model", str(model), "--served-name", "bench", "--port", "0"]
        self._started = time.perf_counter()
        self._process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        match = re.search(r"http://\S+", line)
        if match is None:
            raise RuntimeError(f"the engine did not start: {line!r}")
        self.url = match[0]

    async def wait_ready(self, session: aiohttp.ClientSession) -> float:
        return await _wait_ready(self._process, f"{self.url}/health", session, self._started)

    def cpu_seconds(self) -> dict[str, float]:
        """Of the HTTP process and of the core."""
        process = psutil.Process(self._process.pid)
        return {"http": _cpu(process), "core": sum(_cpu(child) for child in process.children(recursive=True))}

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        if self._process.stdout is not None:
            self._process.stdout.close()


class PeerProcess:
    """Another engine's server, what it prints kept in a file until it is needed."""

    def __init__(self, start: engine_peers.Start) -> None:
        self.url = start.url
        self._health = start.url + start.health
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._started = time.perf_counter()
        environment = {**os.environ, **start.environment}
        self._process = subprocess.Popen(start.command, stdout=self._log, stderr=self._log, text=True, env=environment)

    async def wait_ready(self, session: aiohttp.ClientSession) -> float:
        try:
            return await _wait_ready(self._process, self._health, session, self._started)
        except RuntimeError as error:
            self._log.seek(0)
            raise RuntimeError(f"{error}; its last words: {self._log.read().strip()[-600:]}") from error

    def cpu_seconds(self) -> dict[str, float]:
        """Of all its processes."""
        process = psutil.Process(self._process.pid)
        return {"core": _cpu(process) + sum(_cpu(child) for child in process.children(recursive=True))}

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """One answer, in seconds."""

    tokens: int
    first: float
    per_token: float


async def stream_answer(
    session: aiohttp.ClientSession, url: str, prompt: list[int], length: int = ANSWER_TOKENS, model: str = "bench"
) -> StreamTimes:
    """Read one streamed answer of `length` tokens to its end.

    Raises:
        RuntimeError: the answer is not complete.
    """
    start = time.perf_counter()
    first = last = 0.0
    tokens = 0
    async with session.post(f"{url}/v1/completions", json=engine_peers.body(model, prompt, length)) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            if b'"usage"' in line and (reported := engine_peers.completion_tokens(line)) is not None:
                tokens = reported
                continue
            last = time.perf_counter()
            first = first or last
    if tokens != length:
        raise RuntimeError(f"{tokens} tokens instead of {length}")
    return StreamTimes(tokens, first - start, (last - first) / max(1, tokens - 1))


def _prompts(numbers: random.Random, count: int, length: int) -> list[list[int]]:
    return [numbers.choices(VOCABULARY, k=length) for _ in range(count)]


async def measure_server(
    server: Server, system: str, streams: Sequence[int], runs: int, seconds: float, long_prompt: int = LONG_PROMPT
) -> list[Row]:
    """Rows of a server that has been started."""
    rows: list[Row] = []
    numbers = random.Random(1)
    timeout = aiohttp.ClientTimeout(total=None)
    # A connection for each answer: some servers close theirs when they have been idle for a moment.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        startup = await server.wait_ready(session)
        rows.append(Row.of("startup", system, "from the command to ready", "s", [startup]))
        budget = Budget(seconds)
        for count in streams:
            series = Series(system, setting(count))
            for run in budget.runs(system, count, runs):
                if run == 0:
                    warm_up = _prompts(numbers, count, PROMPT_TOKENS)
                    await asyncio.gather(*(stream_answer(session, server.url, p, WARM_UP_TOKENS) for p in warm_up))
                prompts = _prompts(numbers, count, PROMPT_TOKENS)
                cpu_before = server.cpu_seconds()
                start = time.perf_counter()
                answers = await asyncio.gather(*(stream_answer(session, server.url, p) for p in prompts))
                elapsed = time.perf_counter() - start
                cpu = {part: used - cpu_before[part] for part, used in server.cpu_seconds().items()}
                tokens = sum(answer.tokens for answer in answers)
                series.add("tokens_per_second", "1/s", tokens / elapsed)
                series.add("ttft_p50", "ms", 1000 * statistics.median(answer.first for answer in answers))
                series.add("tpot_p50", "ms", 1000 * statistics.median(answer.per_token for answer in answers))
                for part, used in cpu.items():
                    series.add(f"{part}_cpu_per_token", "ms", 1000 * used / tokens)
            rows += series.rows()
        rows += await _measure_long_prompts(session, server, system, numbers, runs, long_prompt)
    return rows


async def _measure_long_prompts(
    session: aiohttp.ClientSession, server: Server, system: str, numbers: random.Random, runs: int, length: int
) -> list[Row]:
    """Rows of one prompt that nothing is known of, and of one of which only the last tokens are new."""
    cold, warm = Series(system, f"in={length}"), Series(system, f"in={length + NEW_TOKENS}, cached={length}")
    for _ in range(runs):
        (prompt,) = _prompts(numbers, 1, length)
        answer = await stream_answer(session, server.url, prompt, 1)
        cold.add("prefill_tokens_per_second", "1/s", length / answer.first)
        answer = await stream_answer(session, server.url, prompt + _prompts(numbers, 1, NEW_TOKENS)[0], 1)
        warm.add("ttft_warm_prefix", "ms", 1000 * answer.first)
    return cold.rows() + warm.rows()


async def measure_engine(
    model: Path,
    arguments: Sequence[str],
    streams: Sequence[int],
    runs: int,
    seconds: float,
    long_prompt: int = LONG_PROMPT,
) -> list[Row]:
    """Rows of the bundled engine."""
    engine = EngineProcess(model, arguments)
    try:
        return await measure_server(engine, "tierline", streams, runs, seconds, long_prompt)
    finally:
        engine.stop()


async def measure_other(options: argparse.Namespace, name: str, model: Path) -> list[Row]:
    """Rows of an engine from `engine_peers`; none, and a line that says why, where it cannot be measured here."""
    try:
        start = engine_peers.PEERS[name](options.installed.absolute(), model, options.threads, max(options.streams))
        peer = PeerProcess(start)
        try:
            return await measure_server(peer, name, options.streams, options.runs, options.seconds)
        finally:
            peer.stop()
    except (engine_peers.LeftOut, RuntimeError, TimeoutError, aiohttp.ClientError) as error:
        print(f"{name}: left out: {error}", file=sys.stderr)
        return []


def setting(streams: int) -> str:
    """The `setting` column of a number of streams."""
    return f"streams={streams}, in={PROMPT_TOKENS}, out={ANSWER_TOKENS}"


def measure_transformers(options: argparse.Namespace, model: Path, dtype: str) -> list[Row]:
    """Rows of transformers."""
    arguments = ["--dtype", dtype, "--runs", str(options.runs), "--seconds", str(options.seconds)]
    arguments += ["--streams", ",".join(map(str, options.streams))]
    return _rows_of("bench.transformers_peer", options, model, arguments)


def _rows_of(module: str, options: argparse.Namespace, model: Path, arguments: Sequence[str] = ()) -> list[Row]:
    """The rows that a module prints, from a process of its own."""
    command = [sys.executable, "-m", module, str(model), "--threads", str(options.threads), *arguments]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [Row(**row) for row in json.loads(output.splitlines()[-1])]


def _model_file(path: Path) -> Path:
    """The GGUF file itself, or the first one in the folder."""
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    if not files:
        raise SystemExit(f"no GGUF file at {path}; run 'tierline models pull smollm2-135m' or give --model")
    return files[0]


def main() -> None:
    """Measure, print the table, write `bench/results/engine.json`."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description="Measure the bundled engine over HTTP.")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="a GGUF file or its folder (%(default)s)")
    parser.add_argument("--streams", type=lambda t: [int(n) for n in t.split(",")], default=[1, 8, 32])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60, help="of runs, for each system (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="auto", help="of the bundled engine (%(default)s)")
    peers = ", ".join(engine_peers.PEERS)
    parser.add_argument("--peers", default="", help=f"other engines, of {peers}; comma-separated")
    parser.add_argument("--installed", type=Path, default=Path("var/peers"), help="where peers are kept (%(default)s)")
    parser.add_argument("--without-peers", action="store_true", help="leave transformers out, too")
    options = parser.parse_args()
    others = [name for name in options.peers.split(",") if name]
    if unknown := set(others) - engine_peers.PEERS.keys():
        parser.error(f"unknown peers {', '.join(sorted(unknown))}: choose from {peers}")
    model = _model_file(options.model)
    arguments = ["--threads", str(options.threads), "--precision", options.precision, "--max-model-len", "1024"]
    rows = asyncio.run(measure_engine(model, arguments, options.streams, options.runs, options.seconds))
    rows += _rows_of("bench.engine_checks", options, model)
    for name in others:
        rows += asyncio.run(measure_other(options, name, model))
    if not options.without_peers:
        for dtype in ("bfloat16", "float32"):
            rows += measure_transformers(options, model, dtype)
    report("engine", rows)


if __name__ == "__main__":
    main()
