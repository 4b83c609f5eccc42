"""The journal on a full or failing disk, and of a process that is killed: nothing that was reported is lost."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.ledger.journal import Journal, JournalFailed, JournalFull
from gateway.ledger.records import Close, Open
from tests.gateway.journals import closed, contents, row


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal.open(tmp_path, segment_bytes=64 * 1024)
    yield opened
    opened.close()


_LIMITED = """
    import os, resource, signal, sys
    from pathlib import Path
    from gateway.ledger.journal import Journal, JournalFull
    from gateway.ledger.records import Close, Open
    from gateway.ledger.rows import LedgerRow

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    row = lambda n: LedgerRow(attempt_id=str(n), request_id="r", attempt=1, ts_ms=1)
    journal = Journal.open(Path(sys.argv[1]), segment_bytes=65536)
    # From here on the kernel lets no file grow to that size: no second segment can be made.
    resource.setrlimit(resource.RLIMIT_FSIZE, (65535, resource.RLIM_INFINITY))
    opened = 0
    try:
        while True:
            journal.append(Open(row(opened)))
            opened += 1
    except JournalFull as error:
        assert "disk space" in str(error) and journal.error == str(error), error
    for n in range(opened):
        closing = row(n)
        closing.set_error("e" * 2000)
        journal.append(Close(closing))
    try:
        for n in range(1000):
            journal.append(Open(row(f"late {n}")))
            journal.append(Close(row(f"late {n}")))
        raise SystemExit("a journal without room accepted everything")
    except JournalFull:
        pass
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    journal.append(Open(row("again")))
    assert journal.error is None
    print(opened)
    journal.close()
"""


def test_a_full_disk_refuses_new_attempts_and_closes_all_old_ones(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_LIMITED), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    opened = int(done.stdout)
    assert opened > 5
    journal = Journal.open(tmp_path)
    assert set(closed(journal)) >= {str(n) for n in range(opened)}
    assert [r.attempt_id for r in journal.interrupted if not r.attempt_id.startswith("late")] == ["again"]
    journal.close()


def test_no_room_at_all_is_said_at_once(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(JournalFull, match="disk space"):
            Journal.open(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    Journal.open(tmp_path).close()


def test_a_disk_that_cannot_sync_stops_new_attempts_until_it_can(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    journal.append(Open(row("running")))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", broken)
        with pytest.raises(JournalFailed, match="failed to sync"):
            journal.sync()
        with pytest.raises(JournalFailed, match="failed to sync"):
            journal.append(Open(row("refused")))
        journal.append(Close(row("running")))
    journal.sync()
    journal.append(Open(row("accepted")))
    assert journal.error is None


_KILLED = """
    import os, sys
    from pathlib import Path
    from gateway.ledger.journal import Journal
    from gateway.ledger.records import Close, Open
    from gateway.ledger.rows import LedgerRow, new_id

    journal = Journal.open(Path(sys.argv[1]), segment_bytes=262144)
    while True:
        row = LedgerRow(attempt_id=new_id(), request_id="r", attempt=1, ts_ms=1)
        journal.append(Open(row))
        row.outcome = "success"
        journal.append(Close(row))
        os.write(1, (row.attempt_id + "\\n").encode())
"""


# In place of a file system that maps no file for writing, which cannot be made here.
_UNMAPPED = """
    import mmap

    def refuse(*_):
        raise OSError(19, "No such device")

    mmap.mmap = refuse
"""


@pytest.mark.parametrize("before", ["", _UNMAPPED], ids=["mapped", "unmapped"])
def test_kill_9_loses_no_row_that_was_reported(tmp_path: Path, before: str) -> None:
    """Three times over the same directory: a process appends and reports as fast as it can, and is killed."""
    reported: list[str] = []
    for wait_s in (0.3, 0.05, 0.4):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(before + _KILLED), str(tmp_path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(wait_s)
        process.send_signal(signal.SIGKILL)
        lines = (first + process.communicate()[0]).decode().split("\n")
        reported += lines[:-1]
    assert len(reported) > 1000
    journal = Journal.open(tmp_path)
    found = [record.row for record in contents(journal) if isinstance(record, Close)]
    times = Counter(row.attempt_id for row in found)
    assert all(times[attempt] == 1 for attempt in reported)
    # Beyond those reported there is at most the one that each process was working on.
    assert len(times) - len(set(reported)) <= 3
    assert {row.outcome for row in found if row.attempt_id in set(reported)} == {"success"}
    journal.close()


_FAILING = """
    import resource, signal, sys
    from pathlib import Path
    from gateway.ledger.journal import Journal, JournalFailed
    from gateway.ledger.records import Close, Decided, Open
    from gateway.ledger.rows import Decision
    from tests.gateway.journals import closed, contents, row

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    journal = Journal.open(Path(sys.argv[1]))
    journal.append(Open(row("first")))
    journal.append(Decided(Decision(request_id="waits", ts_ms=1)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.end.offset + 10, resource.RLIM_INFINITY))
    for record in (Open(row("refused")), Close(row("first"))):
        try:
            journal.append(record)
        except JournalFailed as error:
            assert "cannot write the journal" in str(error) and journal.error == str(error)
        else:
            raise AssertionError("the disk took it")
    assert journal.open_attempts == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    journal.append(Close(row("first")))
    journal.append(Open(row("second")))
    assert journal.error is None
    kinds = [type(record).__name__ for record in contents(journal)]
    assert kinds == ["Open", "Decided", "Close", "Open"], kinds
    journal.close()
"""


def test_a_write_that_fails_in_the_middle_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """Half a record is on the disk then: the next one is written over it."""
    script = textwrap.dedent(_UNMAPPED + _FAILING)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    journal = Journal.open(tmp_path)
    assert closed(journal) == ["first", "second"]
    assert [found.attempt_id for found in journal.interrupted] == ["second"]
    journal.close()
