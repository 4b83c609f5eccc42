"""The file of what was learned: what survives, what is dropped, and what happens where the disk does not take it."""

from __future__ import annotations

import sqlite3
import stat
from pathlib import Path

import pytest

from cache import notebook
from cache.notebook import Given, Notebook

GIVEN = Given("team", "req-1", 7)


def test_what_was_flushed_is_there_again(tmp_path: Path) -> None:
    book = Notebook(tmp_path, "m")
    book.note("req-1", GIVEN)
    assert book.find("req-1") == GIVEN, "before it is written, too"
    assert book.flush({"a": b"one", "b": b"two"})
    book.note("req-lost", GIVEN)
    # Not closed: a killed process loses what came after the last flush, and nothing else.
    again = Notebook(tmp_path, "m")
    assert again.find("req-1") == GIVEN
    assert again.find("req-lost") is None
    assert again.promises() == [b"one", b"two"]
    assert again.flush({"a": b"three"})
    assert again.promises() == [b"two", b"three"], "the one that changed last stands last"
    assert stat.S_IMODE((tmp_path / "learned.db").stat().st_mode) == 0o600
    again.close()
    book.close()


def test_another_embedder_begins_anew_and_keeps_who_got_what(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    book = Notebook(tmp_path, "one embedder")
    book.note("req-1", GIVEN)
    book.flush({"a": b"one"})
    book.close()
    other = Notebook(tmp_path, "another embedder")
    assert other.promises() == []
    assert "begins anew" in caplog.text
    assert other.find("req-1") == GIVEN
    other.close()


def test_without_a_folder_it_is_memory_only() -> None:
    book = Notebook(None, "m")
    book.note("req-1", GIVEN)
    assert book.flush({"a": b"one"})
    assert (book.find("req-1"), book.promises()) == (GIVEN, [b"one"])
    book.close()


def test_a_damaged_file_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "learned.db").write_bytes(b"no database at all, and long enough for that" * 100)
    book = Notebook(tmp_path, "m")
    assert "damaged" in caplog.text
    assert list(tmp_path.glob("learned.damaged-*.db"))
    assert book.flush({"a": b"one"})
    book.close()


def test_a_file_of_another_schema_begins_anew(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "learned.db") as database:
        database.execute("CREATE TABLE requests (something_else TEXT)")
        database.execute("PRAGMA user_version = 99")
    database.close()
    book = Notebook(tmp_path, "m")
    book.note("req-1", GIVEN)
    assert book.flush({})
    assert book.find("req-1") == GIVEN
    book.close()


def test_a_full_disk_is_waited_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    book = Notebook(tmp_path, "m")
    pages = book._database.execute("PRAGMA page_count").fetchone()[0]
    book._database.execute(f"PRAGMA max_page_count = {pages}")
    book.note("req-1", GIVEN)
    big = {"a": b"x" * 100_000}
    assert not book.flush(big)
    assert not book.flush(big)
    assert caplog.text.count("cannot be written") == 1, "said once"
    assert book.find("req-1") == GIVEN
    book._database.execute("PRAGMA max_page_count = 1000000")
    assert book.flush(big)
    assert "is written to" in caplog.text
    assert book.promises() == [b"x" * 100_000]
    book.close()


def test_old_requests_and_promises_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "_MOST_REQUESTS", 10)
    monkeypatch.setattr(notebook, "_MOST_PROMISES", 2)
    book = Notebook(tmp_path, "m")
    for number in range(25):
        book.note(f"req-{number}", GIVEN)
        book.flush({f"p{number}": b"%d" % number})
    known = [number for number in range(25) if book.find(f"req-{number}")]
    assert known == list(range(15, 25))
    assert book.promises() == [b"23", b"24"]
    book.close()


def test_a_flush_writes_so_much_at_once_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "_ROWS_AT_ONCE", 4)
    book = Notebook(None, "m")
    for number in range(10):
        book.note(f"req-{number}", GIVEN)
    left = []
    while book.unwritten:
        assert book.flush({})
        left.append(book.unwritten)
    assert left == [6, 2, 0]
    assert all(book.find(f"req-{number}") == GIVEN for number in range(10))
    book.close()


def test_a_flood_of_requests_is_bounded_while_the_disk_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "_MOST_UNWRITTEN", 3)
    book = Notebook(None, "m")
    for number in range(5):
        book.note(f"req-{number}", GIVEN)
    assert [book.find(f"req-{number}") is not None for number in range(5)] == [True] * 3 + [False] * 2
    book.note("req-1", Given("other", "req-2"))
    assert book.find("req-1") == Given("other", "req-2")
    book.close()
