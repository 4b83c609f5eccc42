"""The second pool: slots of a file, the least recently used one for the next value."""

import os
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.transfer.host_store import HostStore
from engine.transfer.store import StoreFailed

SIZE = 64


def value(number: int) -> bytes:
    return number.to_bytes(4, "big") * (SIZE // 4)


class History(RuleBasedStateMachine):
    """Saves, loads and discards in any order, beside a list that does the same."""

    @initialize(slots=st.integers(1, 5), on_disk=st.booleans())
    def start(self, slots, on_disk):
        self.store = HostStore(slots * SIZE + SIZE // 2, SIZE, Path(tempfile.gettempdir()) if on_disk else None)
        self.kept: list[bytes] = []  # the least recently used first
        self.slots = slots

    @rule(keys=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def save(self, keys):
        self.store.save([(bytes([key]), value(key)) for key in keys])
        for key in keys:
            if bytes([key]) in self.kept:
                self.kept.remove(bytes([key]))
            self.kept.append(bytes([key]))
            self.kept = self.kept[-self.slots :]

    @rule(keys=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def load(self, keys):
        for key, found in zip(keys, self.store.load([bytes([key]) for key in keys]), strict=True):
            assert found == (value(key) if bytes([key]) in self.kept else None)
            if bytes([key]) in self.kept:
                self.kept.remove(bytes([key]))
                self.kept.append(bytes([key]))

    @rule(key=st.integers(0, 9))
    def discard(self, key):
        self.store.discard(bytes([key]))
        if bytes([key]) in self.kept:
            self.kept.remove(bytes([key]))

    @invariant()
    def slots_are_free_or_hold_one_value(self):
        if hasattr(self, "store"):
            self.store.check()
            assert len(self.store) == len(self.kept)
            assert all(self.store.holds(key) for key in self.kept)

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()


History.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHistory = History.TestCase


def test_a_file_leaves_no_name_behind(tmp_path):
    store = HostStore(SIZE * 4, SIZE, tmp_path)
    store.save([(b"a", value(1))])
    assert list(tmp_path.iterdir()) == []
    assert store.load([b"a", b"b"]) == [value(1), None]
    store.close()


def test_what_cannot_hold_pages_is_refused(tmp_path):
    with pytest.raises(ValueError, match="63 bytes hold no page: one takes 64"):
        HostStore(63, SIZE)
    with pytest.raises(ValueError, match="cannot hold pages: No such file"):
        HostStore(SIZE, SIZE, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="bytes free; 1,152,921,504,606,846,976 are asked for"):
        HostStore(1 << 60, 1 << 20, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_is_said_so_and_loses_no_slot():
    store = HostStore(SIZE * 4, SIZE)
    store.save([(b"a", value(1))])
    file = store._file
    store._file = os.open("/dev/null", os.O_RDONLY)  # cannot be written to
    with pytest.raises(StoreFailed, match="writing a page failed"):
        store.save([(b"b", value(2))])
    os.close(store._file)
    with pytest.raises(StoreFailed, match="reading a page failed"):
        store.load([b"a"])
    store._file = file
    store.check()
    assert store.load([b"a", b"b"]) == [value(1), None]
    store.close()


def test_many_threads_at_once_read_what_was_written():
    store = HostStore(SIZE * 8, SIZE)
    wrong = []

    def work(seed):
        for i in range(300):
            key = (i * seed) % 12
            store.save([(bytes([key]), value(key))])
            found = store.load([bytes([key])])[0]
            if found is not None and found != value(key):
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    store.check()
    store.close()
