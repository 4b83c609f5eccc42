"""Word vectors: kindred words lie close, unknown ones count for nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tiers.features import extract
from tiers.words import INPUTS, SIZE, WORDS_FILE, WordVectors, default_words


def inputs(text: str) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return default_words().inputs(extract([{"role": "user", "content": text}]))


def alike(one: str, other: str) -> float:
    a, b = inputs(one)[:SIZE], inputs(other)[:SIZE]
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize(
    ("word", "near", "far"),
    [("software", "programming", "butter"), ("translate", "language", "carpet"), ("doctor", "hospital", "guitar")],
)
def test_kindred_words_are_close(word: str, near: str, far: str) -> None:
    assert alike(word, near) > alike(word, far) + 0.1


def test_what_is_unknown_counts_for_nothing() -> None:
    assert not inputs("xqzzv blorpf").any()
    assert not inputs("").any()
    assert alike("doctor", "doctor xqzzv") == pytest.approx(1)
    assert inputs("doctor").shape == (INPUTS,)
    assert "doctor" in default_words()
    assert "xqzzv" not in default_words()


def test_the_file_is_small_and_missing_is_said(tmp_path: Path) -> None:
    assert WORDS_FILE.stat().st_size < 1_500_000
    with pytest.raises(FileNotFoundError):
        WordVectors.load(tmp_path / "none.npz")
