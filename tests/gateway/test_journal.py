"""The journal: nothing that was appended is lost, whatever is cut, killed, full or torn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.ledger import frames
from gateway.ledger.damaged import keep_aside
from gateway.ledger.journal import Journal, JournalBusy, JournalFailed, Position
from gateway.ledger.records import Close, Decided, Noted, Open, Progress, Record, concerns_database, decode, encode
from gateway.ledger.rows import Decision, Note
from tests.gateway.journals import closed, contents, row

SMALL = 64 * 1024


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal.open(tmp_path, segment_bytes=SMALL)
    yield opened
    opened.close()


def test_many_open_attempts_do_not_make_a_segment_of_each_record(journal: Journal) -> None:
    """What is set aside for their ends is many times a segment."""
    for number in range(300):
        journal.append(Open(row(f"attempt-{number}")))
    before = len(journal.segments())
    assert before <= 12
    for _ in range(20):
        for number in range(300):
            journal.append(Progress(f"attempt-{number}", 1, 1))
    assert len(journal.segments()) <= before + 2, "six thousand small records have room where 300 ends have"
    for number in range(300):
        journal.append(Close(row(f"attempt-{number}", error="ü" * 1000)))
    assert len(closed(journal)) == 300


def test_records_come_back_in_order(journal: Journal) -> None:
    records: list[Record] = [
        Open(row("a")),
        Progress("a", 5, 7),
        Decided(Decision(request_id="r", ts_ms=1, features={"x": [1, "y"]}, candidates=[{"model": "m"}])),
        Noted(Note(id="n", request_id="r", ts_ms=1, kind="told", data={"x": [1, "y"]})),
        Close(row("a", cost_nanousd=2**62, error="ü" * 100)),
    ]
    for record in records:
        journal.append(record)
    assert contents(journal) == records
    assert journal.closes == 1
    assert journal.open_attempts == 0


def test_open_attempts_become_interrupted_rows(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    journal.append(Open(row("kept", input_tokens=100, cost_nanousd=1000)))
    journal.append(Open(row("done")))
    journal.append(Open(row("started", input_tokens=50, cost_nanousd=500)))
    journal.append(Progress("kept", 20, 1200))
    journal.append(Progress("kept", 40, 1400))
    journal.append(Close(row("done", outcome="success")))
    journal.close()
    for _ in range(2):
        # The second time finds nothing left to close: the first one's rows are in the journal.
        again = Journal.open(tmp_path)
        interrupted = {record.row.attempt_id: record.row for record in contents(again) if isinstance(record, Close)}
        assert Counter(closed(again)) == Counter(["done", "kept", "started"])
        kept, started = interrupted["kept"], interrupted["started"]
        assert (kept.outcome, kept.usage_source) == ("interrupted", "estimated")
        assert (kept.input_tokens, kept.output_tokens, kept.cost_nanousd) == (100, 40, 1400)
        assert (started.input_tokens, started.output_tokens, started.cost_nanousd) == (50, 0, 500)
        assert again.closes == 3
        again.close()


def test_one_process_at_a_time(journal: Journal, tmp_path: Path) -> None:
    with pytest.raises(JournalBusy, match="another running process"):
        Journal.open(tmp_path)
    journal.append(Close(row("a")))


def test_a_place_that_cannot_be_used_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalFailed, match="cannot use the journal"):
        Journal.open(tmp_path / "file" / "journal")


def test_segments_rotate_and_go_when_they_are_stored(journal: Journal) -> None:
    journal.append(Open(row("long", output_tokens=1)))
    journal.append(Progress("long", 2, 3))
    for n in range(500):
        journal.append(Open(row(str(n))))
        journal.append(Close(row(str(n), error="x" * 500)))
    assert len(journal.segments()) > 3
    journal.carry(journal.end.segment)
    journal.sync()
    journal.drop(journal.end.segment)
    assert journal.segments() == [journal.end.segment]
    left = contents(journal)
    assert [r.row.attempt_id for r in left if isinstance(r, Open) and r.row.attempt_id == "long"] == ["long"]
    assert [r for r in left if isinstance(r, Progress)] == [Progress("long", 2, 3)]
    journal.close()
    again = Journal.open(journal.directory)
    assert [(r.attempt_id, r.output_tokens) for r in again.interrupted] == [("long", 2)]
    again.close()
    journal.__dict__.update(Journal.open(journal.directory).__dict__)  # the fixture closes it


def test_a_segment_gives_back_what_it_did_not_need(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    journal.append(Close(row("a")))
    journal.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("*.journal")) < 1000


def test_progress_of_an_unknown_attempt_is_a_mistake(journal: Journal) -> None:
    with pytest.raises(ValueError, match="not open"):
        journal.append(Progress("nobody", 1, 1))


def test_a_torn_tail_loses_only_what_was_torn(tmp_path: Path) -> None:
    """Cut the file at every byte: all whole records before the cut come back, and the journal opens and works."""
    whole = tmp_path / "whole"
    journal = Journal.open(whole)
    ends = []
    for n in range(4):
        journal.append(Close(row(str(n))))
        ends.append(journal.end.offset)
    path = whole / f"{journal.end.segment:012d}.journal"
    journal.close()
    content = path.read_bytes()
    assert len(content) == ends[-1]
    torn = tmp_path / "torn"
    for cut in range(len(content) + 1):
        torn.mkdir()
        (torn / path.name).write_bytes(content[:cut])
        again = Journal.open(torn, segment_bytes=SMALL)
        expected = [str(n) for n in range(4) if ends[n] <= cut]
        assert closed(again) == expected, cut
        assert again.closes == len(expected)
        again.append(Close(row("new")))
        assert closed(again) == [*expected, "new"]
        again.close()
        for file in torn.iterdir():
            file.unlink()
        torn.rmdir()


def test_damage_in_the_middle_costs_only_the_damaged_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal.open(tmp_path)
    starts = []
    for n in range(5):
        starts.append(journal.end.offset)
        journal.append(Close(row(str(n))))
    path = tmp_path / f"{journal.end.segment:012d}.journal"
    journal.close()
    content = bytearray(path.read_bytes())
    content[starts[2] + 30] ^= 0x55
    path.write_bytes(content)
    again = Journal.open(tmp_path)
    assert closed(again) == ["0", "1", "3", "4"]
    aside = path.with_name(path.name + ".damaged")
    assert f"{aside}, bytes {starts[2]} to {starts[3]}" in caplog.text
    again.drop(again.end.segment)
    assert not path.exists(), "what is stored goes"
    assert aside.read_bytes() == bytes(content), "what was damaged can still be looked at"
    again.close()
    Journal.open(tmp_path).close()
    assert aside.exists()


def test_few_damaged_segments_are_kept(tmp_path: Path) -> None:
    for number in range(1, 7):
        path = tmp_path / f"{number:012d}.journal"
        path.write_text(f"damage {number}")
        for _ in range(2):
            assert keep_aside(path).read_text() == f"damage {number}"
        path.unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{n:012d}.journal.damaged" for n in (4, 5, 6)]
    path.write_text("of another journal")
    assert keep_aside(path).read_text() == "of another journal"


@given(st.binary(max_size=300), st.lists(st.binary(max_size=50), max_size=5), st.integers(0, 2**32 - 1))
def test_frames_survive_garbage_between_them(garbage: bytes, payloads: list[bytes], salt: int) -> None:
    buffer = garbage + b"".join(frames.pack(payload, salt) for payload in payloads)
    found = [frame for frame in frames.unpack(buffer, salt) if frame.payload is not None]
    assert [frame.payload for frame in found][-len(payloads) :] == payloads or not payloads
    assert all(buffer[frame.start : frame.end] for frame in found)


def test_a_clients_bytes_never_pass_for_a_record(tmp_path: Path) -> None:
    """A whole frame inside a torn one, as a client might send it, needs the segment's secret salt."""
    forged = frames.pack(encode(Close(row("forged"))), 0)
    salt = 12345
    inner = encode(Close(row("real", error=forged.decode("latin-1"))))
    torn = frames.pack(inner + forged, salt)[:-1]
    assert [frame.payload for frame in frames.unpack(torn, salt)] == [None]


def test_records_of_a_newer_version_are_not_thrown_away(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    journal._write(b"\x81\xa4type\xa6future")
    journal.close()
    with pytest.raises(JournalFailed, match="newer version"):
        Journal.open(tmp_path)


@given(st.text(), st.integers(0, 2**60))
def test_the_writer_skips_what_only_recovery_reads(text: str, number: int) -> None:
    decision = Decision(request_id=text, ts_ms=number)
    assert concerns_database(encode(Close(row(text, cost_nanousd=number))))
    assert concerns_database(encode(Decided(decision)))
    assert concerns_database(encode(Noted(Note(id="n", request_id=text, ts_ms=number, kind=text))))
    assert not concerns_database(encode(Open(row(text, cost_nanousd=number))))
    assert not concerns_database(encode(Progress(text, number, number)))


def test_unknown_fields_and_missing_ones_survive_an_upgrade() -> None:
    import msgspec

    raw = {"type": "close", "row": {"attempt_id": "a", "request_id": "r", "attempt": 1, "ts_ms": 1, "later": 5}}
    assert decode(msgspec.msgpack.encode(raw)) == Close(row("a"))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 40), max_size=150))
def test_any_sequence_leaves_one_row_per_attempt(tmp_path_factory: pytest.TempPathFactory, choices: list[int]) -> None:
    directory = tmp_path_factory.mktemp("journal")
    journal = Journal.open(directory, segment_bytes=8192)
    started: list[str] = []
    running: list[str] = []
    ended: list[str] = []
    for n, choice in enumerate(choices):
        if choice < 15 or not running:
            journal.append(Open(row(str(n))))
            started.append(str(n))
            running.append(str(n))
        elif choice < 25:
            journal.append(Progress(running[choice % len(running)], n, n))
        elif choice < 38:
            ended.append(running.pop(choice % len(running)))
            journal.append(Close(row(ended[-1], outcome="success")))
        else:
            # What the writer does once it has stored everything.
            before = journal.end.segment
            stored = [r.row.attempt_id for r in contents(journal) if isinstance(r, Close)]
            journal.carry(before)
            journal.drop(before)
            left = set(closed(journal))
            ended = [attempt for attempt in ended if attempt not in stored or attempt in left]
    journal.close()
    again = Journal.open(directory, segment_bytes=8192)
    assert Counter(closed(again)) == Counter(ended + running)
    assert {r.attempt_id for r in again.interrupted} == set(running)
    again.close()


def test_a_stale_checkpoint_never_skips_a_new_segment(tmp_path: Path) -> None:
    """The checkpoint survives but the segment it points into does not: its number must not be taken for the new one."""
    journal = Journal.open(tmp_path)
    journal.append(Close(row("lost")))
    journal.save_checkpoint(journal.end)
    journal.close()
    for path in tmp_path.glob("*.journal"):
        path.unlink()
    for n in range(3):
        again = Journal.open(tmp_path)
        again.append(Close(row(f"new {n}")))
        again.close()
    last = Journal.open(tmp_path)
    assert last.closes == 3
    assert last.checkpoint <= Position(last.segments()[0], frames.HEADER_BYTES)
    last.close()


def test_an_unreadable_checkpoint_repeats_the_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal.open(tmp_path)
    journal.append(Close(row("a")))
    journal.save_checkpoint(journal.end)
    journal.close()
    (tmp_path / "checkpoint").write_bytes(b"{")
    again = Journal.open(tmp_path)
    assert again.closes == 1
    assert "checkpoint is unreadable" in caplog.text
    again.close()


def test_the_journal_is_private(journal: Journal) -> None:
    assert journal.directory.stat().st_mode & 0o777 in (0o700, 0o755)  # tmp_path itself was made by pytest
    assert all(path.stat().st_mode & 0o077 == 0 for path in journal.directory.glob("*.journal"))
