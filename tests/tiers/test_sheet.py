"""The labelled sheet: large enough, of all tiers and tasks, each line with a reason; damaged lines are named."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tiers import TIERS
from tiers.task import KINDS, TASKS
from tiers.train import corpus, sheet


def test_the_sheet() -> None:
    labelled = sheet.load()
    assert len(labelled) >= 240
    assert set(Counter(item.tier for item in labelled)) == set(TIERS)
    assert {item.task for item in labelled} == set(TASKS)
    assert all(item.reason and item.prompt for item in labelled)
    assert {item.collection for item in labelled} == {*corpus.HAND_LABELLED, "own"}


def test_line_breaks_come_back() -> None:
    assert any("\n" in item.prompt for item in sheet.load())
    assert not any("\\n\\n" in item.prompt for item in sheet.load())


def test_what_is_trained_on_is_not_on_the_sheet() -> None:
    """Prompts of the public collections are left out by collection; ours must not be there at all."""
    written = {str(example.messages[0]["content"]) for example in corpus.written()}
    assert not written & {item.prompt for item in sheet.load()}
    assert {example.kind for example in corpus.written()} <= KINDS.keys()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("id\ttier\n", "must name the columns"),
        ("", "must name the columns"),
        ("{head}\na/1\tsmall\tchat\n", "x.tsv:2: 3 columns"),
        ("{head}\na/1\thuge\tchat\tr\tp\n", "x.tsv:2: there is no tier 'huge'"),
        ("{head}\na/1\tsmall\tchat\tr\tp\na/1\tsmall\tchat\tr\tp\n", "'a/1' is there twice"),
    ],
)
def test_damaged_sheets(tmp_path: Path, lines: str, words: str) -> None:
    (tmp_path / "x.tsv").write_text(lines.format(head="\t".join(sheet.COLUMNS)))
    with pytest.raises(ValueError, match=words):
        sheet.load(tmp_path)
