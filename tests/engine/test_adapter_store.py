"""The core's adapters without a model: how many there may be, who makes room for whom, and what is tried out first."""

from __future__ import annotations

import select
import threading
from dataclasses import dataclass

import pytest

from engine.adapters.store import AdapterStore
from engine.config import AdapterEntry
from engine.loader.errors import ModelFileError
from engine.messages import AdapterFailed, AdapterGone, AdapterLoaded


@dataclass(frozen=True)
class Fake:
    digest: bytes
    rank: int = 4
    num_bytes: int = 100


class Host:
    """A store as the core turns it. Reading "late" waits for `gate`; what is called "absurd" cannot serve."""

    def __init__(self, most: int, *, spare: bool = True) -> None:
        self.gate = threading.Event()
        self.in_use: set[int] = set()
        self.most_in_memory = 0
        self.store = AdapterStore({}, self._load, self._probe, most, spare=spare)

    def _load(self, entry: AdapterEntry) -> Fake:
        if entry.path == "late":
            assert self.gate.wait(10)
        if entry.path == "damaged":
            raise ModelFileError(entry.path, "is damaged", "Copy it again")
        return Fake(entry.path.encode())

    def _probe(self, adapter_id: int) -> str | None:
        self.most_in_memory = max(self.most_in_memory, len(self.store.loaded))
        return "a value is not finite" if self.store.loaded[adapter_id].digest == b"absurd" else None

    def ask(self, adapter_id: int, path: str = "good", *, replaces: int = 0) -> None:
        self.store.ask(AdapterEntry(adapter_id=adapter_id, path=path, replaces=replaces))

    def news(self, wait: bool = True):
        """What comes next; with `wait`, something must."""
        told = self.store.news(lambda: self.in_use)
        while wait and not told:
            assert select.select([self.store.fileno()], [], [], 10)[0], "nothing comes"
            told = self.store.news(lambda: self.in_use)
        return told

    def loaded(self, adapter_id: int, path: str = "good", *, replaces: int = 0) -> None:
        self.ask(adapter_id, path, replaces=replaces)
        [news] = self.news()
        assert isinstance(news, AdapterLoaded), news
        if replaces:
            self.store.leave(replaces)


def refused(host: Host) -> str:
    [news] = host.news()
    assert isinstance(news, AdapterFailed)
    return news.message


def test_there_are_at_most_so_many_and_one_that_has_gone_makes_room() -> None:
    host = Host(2)
    host.loaded(1)
    host.loaded(2)
    host.ask(3)
    assert "2 adapters are loaded, as many as '--max-loras' allows" in refused(host)
    host.store.leave(1)
    assert host.news() == [AdapterGone(1)]
    host.loaded(4)


def test_one_may_take_the_place_of_another_although_there_are_as_many_as_may_be() -> None:
    host = Host(1)
    host.loaded(1)
    host.in_use = {1}  # a request runs with it
    host.loaded(2, replaces=1)
    assert host.store.loaded.keys() == {1, 2}
    host.in_use = set()
    assert host.news() == [AdapterGone(1)]
    assert host.store.loaded.keys() == {2}
    assert host.most_in_memory == 2


def test_those_that_leave_are_waited_for_and_not_counted() -> None:
    host = Host(1)
    host.loaded(1)
    host.in_use = {1}
    host.loaded(2, replaces=1)
    host.ask(3, replaces=2)  # no room while the first one is in use
    assert host.news(wait=False) == []
    assert host.store.loaded.keys() == {1, 2}
    host.in_use = {2}
    assert host.news() == [AdapterGone(1)]
    assert host.news() == [AdapterLoaded(3, b"good".hex(), 4, 100)]
    host.store.leave(2)
    host.in_use = {3}
    assert host.news() == [AdapterGone(2)]
    assert host.most_in_memory == 2, "one more than may serve"


def test_who_waits_for_room_counts_when_others_come() -> None:
    host = Host(2)
    host.loaded(1)
    host.loaded(2)
    host.ask(3, "late", replaces=1)
    host.ask(4, replaces=2)
    host.ask(5)
    assert "Unload one first" in refused(host)
    host.gate.set()
    [third] = host.news()
    assert third.adapter_id == 3
    host.store.leave(1)
    told = host.news()
    while len(told) < 2:
        told += host.news()
    assert {type(news) for news in told} == {AdapterGone, AdapterLoaded}
    assert host.store.loaded.keys() == {2, 3, 4}


def test_a_place_is_free_again_when_loading_fails() -> None:
    host = Host(1)
    host.ask(1, "damaged")
    assert "is damaged" in refused(host)
    host.loaded(2)
    host.ask(3, "damaged", replaces=2)
    assert "is damaged" in refused(host)
    assert host.store.loaded.keys() == {2}, "the one that was to go serves on"
    host.loaded(4, replaces=2)


def test_what_cannot_serve_is_not_there() -> None:
    host = Host(1)
    host.ask(1, "absurd")
    assert refused(host).startswith("absurd: a value is not finite. The adapter is damaged")
    assert not host.store.loaded
    with pytest.raises(ModelFileError, match="a value is not finite"):
        host.store.load_now(AdapterEntry(adapter_id=2, path="absurd"))
    assert not host.store.loaded
    host.store.load_now(AdapterEntry(adapter_id=3, path="absurd", digest=b"absurd".hex()))
    assert "a value is not finite" in refused(host), "one that served before a restart ends nobody's start"
    host.store.load_now(AdapterEntry(adapter_id=4, path="good"))
    assert [type(news) for news in host.news()] == [AdapterLoaded]
