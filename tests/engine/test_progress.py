"""Loading says how far it is: a bar on a terminal, lines for a log where it takes long, nothing where it does not."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest

from engine.load_runner import load_runner
from engine.loader import progress
from engine.loader.progress import Reported, reported
from engine.loader.source import open_model
from tests.engine.models import write_model


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_blocks_are_counted_as_they_are_taken(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf")
    source = open_model(tmp_path / "tiny.gguf").tensors()
    seen: list[tuple[int, int]] = []
    counted = Reported(source, lambda done, total: seen.append((done, total)))
    layers = counted.layers()
    assert seen == []
    next(layers)
    assert seen == [(0, 2)]
    next(layers)
    assert seen == [(0, 2), (1, 2)]
    assert next(layers, None) is None
    assert seen == [(0, 2), (1, 2), (2, 2)]
    assert counted.spec is source.spec
    for part in ("embedding", "output"):
        assert (getattr(counted, part)().dequantize() == getattr(source, part)().dequantize()).all()
    assert (counted.final_norm() == source.final_norm()).all()


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf")
    terminal = Terminal()
    with reported(open_model(tmp_path / "tiny.gguf").tensors(), "tiny", terminal) as source:
        assert len(list(source.layers())) == 2
    assert "loading tiny" in terminal.getvalue()
    assert "2/2" in terminal.getvalue()


def test_a_log_gets_lines_where_it_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path / "tiny.gguf")
    caplog.set_level(logging.INFO, "engine.loader.progress")
    load_runner(tmp_path / "tiny.gguf", device="cpu", max_model_len=64, kv_cache_bytes=1 << 20)
    assert "loading" not in caplog.text
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    load_runner(tmp_path / "tiny.gguf", device="cpu", max_model_len=64, kv_cache_bytes=1 << 20)
    assert "loading tiny.gguf: 1 of 2 blocks" in caplog.text
