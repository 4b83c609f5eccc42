"""Evaluation: its rates by hand count, its files, and its command."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cache.embedding.embedder import Embedder
from cache.evaluate import Asked, InvalidFile, Pair, evaluate_pairs, evaluate_stream, read_pairs, read_stream

FRANCE = "What is the capital of France?"


def test_pairs(embedder: Embedder) -> None:
    pairs = [
        Pair("What's the capital city of France?", FRANCE, True),
        Pair("Name a good film about the sea", FRANCE, True),
        Pair("What is the capital of Spain?", FRANCE, False),
        Pair(FRANCE, FRANCE, True),
        Pair("What's the capital of France?", FRANCE, False),
        Pair("What is the weather in Paris?", "What is the weather in Paris?", True),
        Pair("Translate hello to French", "Translate hello to French", True),
    ]
    found = evaluate_pairs(pairs, embedder, threshold=0.95)
    decisions = [(decision.outcome, decision.correct, decision.reason) for decision in found.decisions]
    assert decisions == [
        ("semantic", True, None),
        ("miss", None, "below_threshold"),
        ("miss", None, "below_threshold"),
        ("exact", True, None),
        ("semantic", False, None),
        ("miss", None, "time_bound"),
        ("exact", True, None),
    ]
    summary = found.summary
    assert (summary.requests, summary.hits, summary.exact_hits, summary.wrong_hits) == (7, 4, 2, 1)
    assert summary.hit_rate == pytest.approx(4 / 7)
    assert summary.false_hit_rate == pytest.approx(1 / 4)
    assert summary.recall == pytest.approx(3 / 5)
    assert summary.false_accept_rate == pytest.approx(1 / 2)
    assert summary.misses == {"below_threshold": 2, "time_bound": 1}
    # Wilson's interval for 1 of 4, computed independently: (p + z²/2n + z·sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)
    assert summary.false_hit_rate_upper_95 == pytest.approx(0.69936, abs=1e-4)


def test_a_stream_grows_on_misses_only(embedder: Embedder) -> None:
    stream = [
        Asked(FRANCE, "paris"),
        Asked("What is the capital of Spain?", "madrid"),
        Asked("What's the capital city of France?", "paris"),
        Asked(FRANCE, "paris"),
        Asked("What's the capital of Spain?", "another answer"),
        Asked("What is the weather in Paris?", "rain"),
        Asked("What is the weather in Paris?", "rain"),
    ]
    found = evaluate_stream(stream, embedder, threshold=0.95)
    outcomes = [(decision.outcome, decision.correct) for decision in found.decisions]
    assert outcomes == [
        ("miss", None),
        ("miss", None),
        ("semantic", True),
        ("exact", True),
        ("semantic", False),
        ("miss", None),
        ("miss", None),
    ]
    assert found.summary.hit_rate == pytest.approx(3 / 7)
    assert found.summary.false_hit_rate == pytest.approx(1 / 3)
    assert found.summary.recall is None


def test_a_higher_threshold_never_hits_more(embedder: Embedder) -> None:
    stream = [
        Asked(text, "x")
        for text in (FRANCE, "What's the capital city of France?", "Which city is the capital of France?")
    ]
    hits = [evaluate_stream(stream, embedder, threshold=threshold).summary.hits for threshold in (0.90, 0.955, 0.99)]
    assert hits == sorted(hits, reverse=True)
    assert (hits[0], hits[-1]) == (2, 0)


def test_files_are_read_as_they_are(tmp_path: Path) -> None:
    plain = tmp_path / "pairs.tsv"
    plain.write_text('text_a\tnote\ttext_b\tsame\nsay "hi"\t-\tsay hi\tyes\n"a\t-\tb\t0\n', encoding="utf-8-sig")
    assert read_pairs(plain) == [Pair('say "hi"', "say hi", True), Pair('"a', "b", False)]
    packed = tmp_path / "stream.tsv.gz"
    packed.write_bytes(gzip.compress("text\tanswer_id\nZoë?\t1\n".encode()))
    assert read_stream(packed) == [Asked("Zoë?", "1")]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("text_a\ttext_b\nx\ty\n", "no column 'same'"),
        ("text_a\ttext_b\tsame\nx\ty\tmaybe\n", ":2: 'same' must be 1 or 0, got 'maybe'"),
        ("text_a\ttext_b\tsame\nx\ty\t1\nx\n", ":3: the line has fewer columns"),
        ("text_a\ttext_b\tsame\n", "no rows"),
        ("", "no column"),
    ],
)
def test_faulty_files_are_refused_with_the_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "f.tsv"
    path.write_text(content)
    with pytest.raises(InvalidFile) as refused:
        read_pairs(path)
    assert says in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match="cannot be read"):
        read_stream(tmp_path / "none.tsv")


def test_the_command_prints_json(tmp_path: Path) -> None:
    path = tmp_path / "stream.tsv"
    path.write_text(f"text\tanswer_id\n{FRANCE}\t1\nWhat's the capital city of France?\t1\n")
    command = [sys.executable, "-m", "cache.evaluate", "--stream", str(path), "--json"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    document = json.loads(found.stdout)
    assert document["hit_rate"] == document["summary"]["hit_rate"] == 0.5
    assert document["false_hit_rate"] == 0.0
    assert [decision["outcome"] for decision in document["decisions"]] == ["miss", "semantic"]


def test_the_command_refuses_a_faulty_file_before_it_loads_anything(tmp_path: Path) -> None:
    path = tmp_path / "stream.tsv"
    path.write_text("question\n")
    command = [sys.executable, "-m", "cache.evaluate", "--stream", str(path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 2
    assert "no column 'text', 'answer_id'" in found.stderr
