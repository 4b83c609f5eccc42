"""A gateway in front of engines that run already, for benchmarks of what it makes of them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from bench.gateway import answers, free_port, process

MODEL = "bench"
CONTEXT_TOKENS = 4096
_START_S = 60
_FREE = {"input_usd_per_million": 0, "output_usd_per_million": 0}


def pulled_model() -> Path:
    """The small model's file, pulled if it is not here yet."""
    from gateway.models.store import ModelStore

    return ModelStore(Path("var")).pull("smollm2-135m", progress=lambda done, total: None).model.path


@contextlib.contextmanager
def gateway(backend: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
    """Address and key of a gateway that serves MODEL from one `backend`, as tierline.yaml has it. Nothing is cached.

    Raises RuntimeError where it does not answer.
    """
    import policies

    port, config = free_port(), folder / "tierline.yaml"
    model = {"tier": "small", "backend": "engines", "context_length": CONTEXT_TOKENS, "price": _FREE}
    document = {
        "server": {"port": port, "log": {"level": "warning"}},
        "storage": {"data_dir": str(folder / "var")},
        "policies_dir": str(Path(policies.__file__).parent),
        "models": {MODEL: model},
        "backends": {"engines": dict(backend)},
        "cache": {"enabled": False},
    }
    config.write_text(yaml.safe_dump(document))
    create = ["-c", "from gateway.cli import main; main()", "keys", "create", "--config", str(config), "--json"]
    key = json.loads(subprocess.check_output([sys.executable, *create], text=True))["key"]
    url = f"http://127.0.0.1:{port}/v1"
    with process([sys.executable, "-m", "gateway", "--config", str(config)], 0) as started:
        until = time.monotonic() + _START_S
        while not answers(url, [f"authorization: Bearer {key}"], MODEL):
            if started.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the gateway does not answer at {url}")
            time.sleep(0.2)
        yield url, key
