"""The bundled engine over HTTP: tokens per second, time to first token, time per token, with transformers beside it.

    python -m bench.engine [--streams 1,8,32] [--runs 3] [--seconds 100] [--threads 2] [--without-peers]

Every stream sends its own random prompt of 128 token ids and reads 128 tokens (`ignore_eos`), so no prefix is shared
and no answer ends early. The load generator runs beside the server on the same machine. transformers generates the same
batch without HTTP, with weights dequantised from the same file, each data type in a process of its own (bfloat16 where
the processor multiplies it). The figures of CPU time per token hold on a busy machine, too; the others want a quiet
one. Each system is measured for `--seconds` at most: on a slow machine there are fewer runs, and what would not be done
in time is left out, and said to be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from bench.report import Row, report

PROMPT_TOKENS = 128
ANSWER_TOKENS = 128
DEFAULT_MODEL = Path("var/models/smollm2-135m")
WARM_UP_TOKENS = 4
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


class EngineProcess:
    """`python -m engine` on a free port, ready to serve when entered."""

    def __init__(self, model: Path, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "engine", "--model", str(model), "--served-name", "bench", "--port", "0"]
        self._process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        match = re.search(r"http://\S+", line)
        if match is None:
            raise RuntimeError(f"the engine did not start: {line!r}")
        self.url = match[0]

    async def wait_ready(self, session: aiohttp.ClientSession) -> None:
        while True:
            async with session.get(f"{self.url}/health") as response:
                if response.status == 200:
                    return
            if self._process.poll() is not None:
                raise RuntimeError(f"the engine ended with exit code {self._process.returncode}")
            await asyncio.sleep(0.1)

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time so far of the HTTP process and of the core."""
        process = psutil.Process(self._process.pid)
        return _cpu(process), sum(_cpu(child) for child in process.children(recursive=True))

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        if self._process.stdout is not None:
            self._process.stdout.close()


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
    session: aiohttp.ClientSession, url: str, prompt: list[int], length: int = ANSWER_TOKENS
) -> StreamTimes:
    """Read one streamed answer of `length` tokens to its end.

    Raises:
        RuntimeError: the answer is not complete.
    """
    body = {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first = last = 0.0
    usage: dict[str, int] = {}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            if b'"choices":[]' in line:
                usage = json.loads(line[6:])["usage"]
                continue
            last = time.perf_counter()
            first = first or last
    tokens = usage.get("completion_tokens", 0)
    if tokens != length:
        raise RuntimeError(f"{tokens} tokens instead of {length}")
    return StreamTimes(tokens, first - start, (last - first) / (tokens - 1))


async def measure_engine(
    model: Path, arguments: Sequence[str], streams: Sequence[int], runs: int, seconds: float
) -> list[Row]:
    """Rows of the bundled engine."""
    engine = EngineProcess(model, arguments)
    rows: list[Row] = []
    numbers = random.Random(1)

    def prompts(count: int) -> list[list[int]]:
        return [numbers.choices(VOCABULARY, k=PROMPT_TOKENS) for _ in range(count)]

    try:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            await engine.wait_ready(session)
            budget = Budget(seconds)
            for count in streams:
                series = Series("tierline", setting(count))
                for run in budget.runs("tierline", count, runs):
                    if run == 0:
                        warm_up = (stream_answer(session, engine.url, p, WARM_UP_TOKENS) for p in prompts(count))
                        await asyncio.gather(*warm_up)
                    cpu_before = engine.cpu_seconds()
                    start = time.perf_counter()
                    answers = await asyncio.gather(*(stream_answer(session, engine.url, p) for p in prompts(count)))
                    elapsed = time.perf_counter() - start
                    http_cpu, core_cpu = (
                        after - before for after, before in zip(engine.cpu_seconds(), cpu_before, strict=True)
                    )
                    tokens = sum(answer.tokens for answer in answers)
                    series.add("tokens_per_second", "1/s", tokens / elapsed)
                    series.add("ttft_p50", "ms", 1000 * statistics.median(answer.first for answer in answers))
                    series.add("tpot_p50", "ms", 1000 * statistics.median(answer.per_token for answer in answers))
                    series.add("http_cpu_per_token", "ms", 1000 * http_cpu / tokens)
                    series.add("core_cpu_per_token", "ms", 1000 * core_cpu / tokens)
                rows += series.rows()
    finally:
        engine.stop()
    return rows


def setting(streams: int) -> str:
    """The `setting` column of a number of streams."""
    return f"streams={streams}, in={PROMPT_TOKENS}, out={ANSWER_TOKENS}"


def measure_peer(options: argparse.Namespace, model: Path, dtype: str) -> list[Row]:
    """Rows of transformers, from a process of its own."""
    command = [sys.executable, "-m", "bench.transformers_peer", str(model), "--dtype", dtype]
    command += ["--threads", str(options.threads), "--runs", str(options.runs), "--seconds", str(options.seconds)]
    command += ["--streams", ",".join(map(str, options.streams))]
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
    parser.add_argument("--seconds", type=float, default=100, help="of runs, for each system (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="auto", help="of the bundled engine (%(default)s)")
    parser.add_argument("--without-peers", action="store_true", help="leave transformers out")
    options = parser.parse_args()
    model = _model_file(options.model)
    arguments = ["--threads", str(options.threads), "--precision", options.precision, "--max-model-len", "1024"]
    rows = asyncio.run(measure_engine(model, arguments, options.streams, options.runs, options.seconds))
    if not options.without_peers:
        for dtype in ("bfloat16", "float32"):
            rows += measure_peer(options, model, dtype)
    report("engine", rows)


if __name__ == "__main__":
    main()
