"""How the HTTP process begins: the core first, everything else while it loads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import psutil
import pytest

from engine.config import EngineConfig
from engine.serve import CannotServe, serve
from engine.server.model import Model


def cores() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "engine.core" in child.cmdline()]


def test_the_core_starts_before_the_model_is_read_and_ends_when_it_cannot_be_served(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load() -> Model:
        end = time.monotonic() + 60
        while not cores():
            assert time.monotonic() < end
            time.sleep(0.01)
        raise CannotServe("its template is broken")

    config = EngineConfig(model_path="any", served_name="any")
    assert asyncio.run(serve(load, config, {}, None, 60)) == 1  # type: ignore[arg-type]
    assert capsys.readouterr().err == "error: its template is broken\n"
    assert not cores()


def test_what_the_core_need_not_wait_for_is_imported_later() -> None:
    code = "import sys, engine.__main__; print(*{m.partition('.')[0] for m in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "msgspec" in loaded
    assert not {"torch", "gguf", "starlette", "uvicorn", "tokenizers", "jinja2"} & set(loaded)
