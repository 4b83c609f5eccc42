"""Whether an engine's memory stays flat over thousands of requests, many of which their clients give up.

    python -m bench.engine_memory [--requests 10000] [--model PATH]

A real engine over HTTP. Requests are random: prompts new and seen before, streamed and not, several answers, seeds,
log-probabilities, stop strings; a third is left before or in mid-answer. Now and then the load pauses, and while the
engine is idle its processes' own memory is read (what no file backs) and the law of pages is checked: none is used, and
free and cached ones are all there are. By default the model is a tiny random one, so that it ends in a few minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from bench.report import Row, report
from engine.loader.safetensors_writer import stored, write_folder

_NAME = "probe"
_PARALLEL = 24
_VOCABULARY, _HIDDEN, _INNER, _LAYERS, _HEADS, _HEAD_DIM = 256, 64, 96, 2, 4, 16
_ABANDONED = 1 / 3


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The idle engine after so many requests. Bytes are of both processes' own memory."""

    requests: int
    server_bytes: int
    core_bytes: int
    pages_cached: int
    aborts: int


class LawBroken(Exception):
    """Pages are held though nothing runs, or some are missing."""


def write_tiny_model(folder: Path) -> None:
    """A random Llama of two layers whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    kv = _HEADS // 2 * _HEAD_DIM
    shapes = {"model.embed_tokens": (_VOCABULARY, _HIDDEN)}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj": (kv, _HIDDEN) for name in "kv"}
        shapes |= {f"{prefix}self_attn.{name}_proj": (_HIDDEN, _HIDDEN) for name in "qo"}
        shapes |= {f"{prefix}mlp.{name}_proj": (_INNER, _HIDDEN) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj"] = (_HIDDEN, _INNER)
    dice = np.random.default_rng(0)
    tensors = {f"{name}.weight": dice.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    norms = [f"model.layers.{i}.{name}_layernorm" for i in range(_LAYERS) for name in ("input", "post_attention")]
    tensors |= {f"{name}.weight": np.ones(_HIDDEN, dtype=np.float32) for name in (*norms, "model.norm")}
    write_folder(folder, {name: stored(values) for name, values in tensors.items()})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS // 2,
        "head_dim": _HEAD_DIM,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    letters = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


class Engine:
    """`python -m engine` as a process, and what can be read of it. A context manager that ends it."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-m", "engine", "--model", str(model), "--served-name", _NAME, "--port", "0"]
        command += ["--threads", "1", "--max-model-len", "512", "--max-num-seqs", "16"]
        command += ["--kv-cache-bytes", str(4 << 20) if model.is_dir() else str(256 << 20)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        address = re.search(r"http://\S+", self._process.stdout.readline())
        if address is None:
            raise RuntimeError(f"the engine did not start: exit code {self._process.wait()}")
        self.url = address[0]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)

    async def wait_ready(self, http: httpx.AsyncClient) -> None:
        """Raises RuntimeError after two minutes."""
        for _ in range(600):
            if (await http.get("/health")).status_code == 200:
                return
            await asyncio.sleep(0.2)
        raise RuntimeError("the engine is not ready after two minutes")

    async def checkpoint(self, http: httpx.AsyncClient, requests: int) -> Checkpoint:
        """Wait until nothing runs, a minute at most, then look. Raises LawBroken for pages not where they belong."""
        for _ in range(1200):
            found = await self._metrics(http)
            if not found["running_requests"] and not found["waiting_requests"]:
                break
            await asyncio.sleep(0.05)
        total, free, cached, used = (found[f"pages_{state}"] for state in ("total", "free", "cached", "used"))
        if used or free + cached != total:
            raise LawBroken(f"idle, but pages free {free:.0f} + cached {cached:.0f} + used {used:.0f} != {total:.0f}")
        server = psutil.Process(self._process.pid)
        core = next(child for child in server.children() if "engine.core" in child.cmdline())
        return Checkpoint(requests, own_bytes(server.pid), own_bytes(core.pid), int(cached), int(found["aborts_total"]))

    async def _metrics(self, http: httpx.AsyncClient) -> dict[str, float]:
        await http.get("/health")  # its echo goes through the loop, so what comes next is of now
        text = (await http.get("/metrics")).text
        found = re.findall(r'^tierline_engine_(\w+)\{model="\w+"(?:,state="(\w+)")?\} (\S+)$', text, re.MULTILINE)
        return {name + (f"_{state}" if state else ""): float(value) for name, state, value in found}


def own_bytes(pid: int) -> int:
    """Memory of a process that no file backs."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def random_body(dice: random.Random) -> dict[str, Any]:
    """A request of any kind. Of its prompts, two thirds begin as others do."""
    family = dice.randrange(30) if dice.random() < 2 / 3 else dice.randrange(10**9)
    prompt = f"{family} " * dice.randrange(1, 12) + str(dice.random())
    body: dict[str, Any] = {"model": _NAME, "prompt": prompt, "max_tokens": dice.randrange(1, 24)}
    body |= {"stream": dice.random() < 0.6, "n": dice.choice((1, 1, 1, 2)), "ignore_eos": True}
    if dice.random() < 0.2:
        body["seed"] = dice.randrange(1000)
    if dice.random() < 0.2:
        body["logprobs"] = 3
    if dice.random() < 0.2:
        body["stop"] = ["ab", "e"]
    return body


async def _ask(http: httpx.AsyncClient, dice: random.Random) -> None:
    body = random_body(dice)
    patience = dice.randrange(6) if dice.random() < _ABANDONED else None  # lines that are read before the client leaves
    if patience is not None:
        body |= {"max_tokens": 200, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {(await response.aread()).decode()}")
        lines = 0
        async for _ in response.aiter_lines():
            if patience is not None and lines >= patience:
                return
            lines += 1


async def run(model: Path, requests: int, every: int, seed: int = 0) -> list[Checkpoint]:
    """A checkpoint before the first request and after each `every` of them.

    Raises:
        LawBroken: pages are not where they belong.
        RuntimeError: a request was refused, or the engine does not start.
    """
    dice = random.Random(seed)
    with Engine(model) as engine:
        limits = httpx.Limits(max_connections=_PARALLEL + 1)
        async with httpx.AsyncClient(base_url=engine.url, timeout=120, limits=limits) as http:
            await engine.wait_ready(http)
            found = [await engine.checkpoint(http, 0)]
            for done in range(0, requests, every):
                left = iter(range(min(every, requests - done)))

                async def work(left: Any = left) -> None:
                    for _ in left:
                        await _ask(http, dice)

                async with asyncio.TaskGroup() as group:
                    for _ in range(_PARALLEL):
                        group.create_task(work())
                found.append(await engine.checkpoint(http, min(done + every, requests)))
    return found


def rows(found: list[Checkpoint]) -> list[Row]:
    """Memory at every checkpoint, and how much it grew over the second half of the requests."""
    made: list[Row] = []
    half = found[len(found) // 2]
    for process in ("server", "core"):
        sizes = [getattr(one, f"{process}_bytes") for one in found]
        for one, size in zip(found, sizes, strict=True):
            made.append(Row.of("own_memory_bytes", f"tierline {process}", f"requests={one.requests}", "bytes", [size]))
        growth = sizes[-1] - getattr(half, f"{process}_bytes")
        setting = f"requests={half.requests}..{found[-1].requests}"
        made.append(Row.of("growth_bytes", f"tierline {process}", setting, "bytes", [growth]))
    made.append(Row.of("aborts", "tierline", f"requests={found[-1].requests}", "1", [found[-1].aborts]))
    made.append(Row.of("pages_used_when_idle", "tierline", "every checkpoint", "1", [0]))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="An engine's memory over many requests, a third of them given up.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--model", type=Path, help="a GGUF file or a folder (default: a tiny random model)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or Path(folder)
        if options.model is None:
            write_tiny_model(model)
        found = asyncio.run(run(model, options.requests, max(1, options.requests // 10)))
    report("engine_memory", rows(found))


if __name__ == "__main__":
    main()
