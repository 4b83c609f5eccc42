"""`tierline models quantize`: a folder in floats becomes one of four bits, or it is said why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.loader.source import open_model
from tests.engine.byte_tokenizer import write_byte_tokenizer
from tests.engine.models import write_model
from tests.gateway.commands import tierline


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random model with a tokenizer of single bytes."""
    folder = tmp_path / "tiny"
    write_model(tmp_path / "tiny.gguf", tied=False).save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


OPTIONS = ("--group-size", "32", "--samples", "8", "--length", "64")


def test_a_folder_becomes_a_smaller_one(folder: Path) -> None:
    out = folder.parent / "small"
    done = tierline("models", "quantize", str(folder), "--out", str(out), "--method", "gptq", *OPTIONS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].endswith("gptq, 4 bits, groups of 32")
    assert "perplexity, held out" in done.stdout
    assert {path.name for path in folder.iterdir()} == {path.name for path in out.iterdir()}
    assert not list(folder.parent.glob(".small*"))
    matrices = [matrix.encoding for group in open_model(out).tensors().matrices() for matrix in group]
    assert matrices == ["GPTQ"] * 14 + ["F32"]


def test_json_and_a_text_of_ones_own(folder: Path) -> None:
    text = folder.parent / "text.txt"
    text.write_text("All work and no play makes Jack a dull boy. " * 100)
    out = str(folder.parent / "small")
    done = tierline(
        "models", "quantize", str(folder), "--out", out, "--calibration", str(text), "--json", *OPTIONS
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["method"] == "awq"
    assert outcome["calibration_tokens"] == 8 * 64
    assert outcome["held_out_tokens"] == 2 * 64
    assert outcome["perplexity_after"] < 2 * outcome["perplexity_before"]


def test_what_cannot_be_done_leaves_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    short = folder.parent / "short.txt"
    short.write_text("too short")
    out = folder.parent / "small"
    for options, words in (
        (("--group-size", "48"), "groups of 48 do not divide"),
        (("--bits", "3"), "--bits"),
        (("--method", "rtn"), "--method"),
        (("--group-size", "32", "--calibration", str(short)), "has 9 tokens"),
        (("--calibration", "no-such-file"), "no-such-file"),
        (("--length", "8"), "--length at least 32"),
    ):
        refused = tierline("models", "quantize", str(folder), "--out", str(out), *options)
        assert refused.returncode == 2, options
        assert words in capfd.readouterr().err
        assert not out.exists()
    assert tierline("models", "quantize", str(folder), "--out", str(folder)).returncode == 2
    assert "exists already" in capfd.readouterr().err
    assert tierline("models", "quantize", str(folder / "nowhere"), "--out", str(out)).returncode == 2
