"""Pages that an engine fetches from another one: over TCP and through shared memory, and whatever goes wrong there."""

import os
import socket
import threading

import pytest

from engine.messages import NewRequest
from engine.transfer import peer_wire as wire
from engine.transfer.format import PageFormat
from engine.transfer.page_server import MOST_FETCHERS
from engine.transfer.peer_address import PeerAddress
from engine.transfer.peer_store import PeerStore
from engine.transfer.store import StoreFailed
from engine.types import SamplingParams
from tests.engine.fakes import expected_tokens
from tests.engine.link import Link
from tests.engine.page_stores import TieredEngine

PROMPT = list(range(1, 30))  # seven full pages of four, and one token


@pytest.fixture
def engines():
    made = []

    def make(**options):
        made.append(TieredEngine(**options))
        return made[-1]

    make.made = made
    yield make
    for engine in made:
        engine.tiers.close()


@pytest.fixture
def links():
    made = []

    def make(engine):
        made.append(Link(PeerAddress.parse(engine.tiers.offered_at).port))
        return made[-1]

    yield make
    for link in made:
        link.close()


@pytest.fixture(params=["tcp", "shm", "nixl"])
def address(request, tmp_path):
    if request.param == "nixl":
        pytest.importorskip("nixl")
    return f"shm://{tmp_path}/pages" if request.param == "shm" else f"{request.param}://127.0.0.1:0"


def pair(engines, address, **options):
    """A prefilling engine, and a decoding one that may fetch from it."""
    first = engines(offers=address, **options)
    return first, engines(peers=[first.tiers.offered_at])


def test_a_prompt_computed_by_one_engine_is_answered_by_another(engines, address):
    first, second = pair(engines, address)
    first.ask(1, PROMPT, max_tokens=1)
    answer, cached = second.ask(1, PROMPT, pages_from=first.tiers.offered_at)
    assert (answer, cached) == (expected_tokens(PROMPT, 6), 28)
    assert second.runner.tokens_run == 1 + 5, "one token of the prompt, and those of the answer"
    assert second.peers[first.tiers.offered_at].counts.loaded == 7
    assert second.tiers.loads == {"whole": 1}
    for number in range(2, 5):  # the connection is kept
        prompt = [number * 100, *PROMPT]
        first.ask(number, prompt, max_tokens=1)
        assert second.ask(number, prompt, pages_from=first.tiers.offered_at) == (expected_tokens(prompt, 6), 28)
    assert len(first.server._connections) == 1


def test_pages_are_there_as_soon_as_the_prompt_is_answered(engines, address):
    """Nobody waits for the thread that fills the outbox; whoever asks does."""
    first, second = pair(engines, address)
    gate, save = threading.Event(), first.server.outbox.store.save

    def slow(values):
        gate.wait()
        save(values)

    first.server.outbox.store.save = slow
    request = threading.Timer(0.1, gate.set)
    first.add(NewRequest(1, PROMPT, SamplingParams(max_tokens=1)))
    while first.scheduler.has_work:
        first.step()
    request.start()
    assert second.ask(1, PROMPT, pages_from=first.tiers.offered_at) == (expected_tokens(PROMPT, 6), 28)


def test_what_the_prefilling_engine_found_in_its_cache_is_offered_again(engines, address):
    first = engines(offers=address, offers_bytes=8 * 200)
    room = first.server.outbox.store.total
    assert 7 <= room < 14
    first.ask(1, PROMPT, max_tokens=1)
    first.ask(2, [500, *PROMPT], max_tokens=1)  # takes the room of the first
    assert first.ask(3, PROMPT, max_tokens=1)[1] == 28, "found here, so nothing was computed"
    second = engines(peers=[first.tiers.offered_at])
    assert second.ask(1, PROMPT, pages_from=first.tiers.offered_at) == (expected_tokens(PROMPT, 6), 28)


def test_pages_are_fetched_only_from_where_the_request_says_and_the_operator_allows(engines, address):
    first, second = pair(engines, address)
    first.ask(1, PROMPT, max_tokens=1)
    assert second.ask(1, PROMPT, salt="a")[1] == 0, "nobody said where"
    assert second.ask(2, PROMPT, salt="b", pages_from="tcp://10.1.2.3:4")[1] == 0
    assert second.tiers.loads == {"unknown_peer": 1, "skipped": 2}
    assert not first.server._connections


def test_salts_and_seeds_stay_apart(engines, address):
    first, second = pair(engines, address)
    first.ask(1, PROMPT, salt="a", max_tokens=1)
    assert second.ask(1, PROMPT, salt="b", pages_from=first.tiers.offered_at)[1] == 0
    stranger = engines(peers=[first.tiers.offered_at], seed=b"t" * 32)
    assert stranger.ask(1, PROMPT, salt="a", pages_from=first.tiers.offered_at) == (expected_tokens(PROMPT, 6), 0)
    assert stranger.peers[first.tiers.offered_at].counts.failures == 1, "it is not let in"


def store_of(engine, address, *, space=None, secret=None, value_bytes=None):
    return PeerStore(
        PeerAddress.parse(address),
        space=space or engine.format.space,
        secret=secret or engine.cache.secret(b"kv transfer"),
        value_bytes=value_bytes or engine.format.value_bytes,
    )


def test_who_is_not_let_in_is_told_why(engines, address):
    engine = engines(offers=address)
    where = engine.tiers.offered_at
    other = PageFormat(model_digest=b"fake model", layout="another", page_bytes=8, secret=b"s")
    keys = [bytes(32)]
    welcome = store_of(engine, where)
    assert welcome.load(keys) == [None]
    welcome.close()
    with pytest.raises(StoreFailed, match="another page seed"):
        store_of(engine, where, secret=bytes(32)).load(keys)
    with pytest.raises(StoreFailed, match="another model, data type, shape or layout version"):
        store_of(engine, where, space=other.space).load(keys)
    with pytest.raises(StoreFailed, match="pages have"):
        store_of(engine, where, value_bytes=99).load(keys)


def test_a_layout_version_of_another_release_is_refused(engines, address, monkeypatch):
    first = engines(offers=address)
    first.ask(1, PROMPT, max_tokens=1)
    monkeypatch.setattr("engine.transfer.format.VERSION", 2)
    second = engines(peers=[first.tiers.offered_at])
    space = second.format.space
    monkeypatch.undo()
    with pytest.raises(StoreFailed, match="layout version"):
        store_of(first, first.tiers.offered_at, space=space).load([bytes(32)])
    second.peers[first.tiers.offered_at].store._space = space
    assert second.ask(1, PROMPT, pages_from=first.tiers.offered_at) == (expected_tokens(PROMPT, 6), 0)


def test_there_are_never_more_fetchers_than_threads_for_them(engines):
    engine = engines(offers="tcp://127.0.0.1:0")
    held = [
        socket.create_connection(("127.0.0.1", PeerAddress.parse(engine.tiers.offered_at).port))
        for _ in range(MOST_FETCHERS)
    ]
    for connection in held:
        wire.receive(connection, wire.HELLO.size)  # so all are accepted
    with pytest.raises(StoreFailed, match="too many"):
        store_of(engine, engine.tiers.offered_at).load([bytes(32)])
    for connection in held:
        connection.close()


def test_nonsense_ends_the_connection_and_nothing_else(engines):
    engine = engines(offers="tcp://127.0.0.1:0")
    engine.ask(1, PROMPT, max_tokens=1)
    port = PeerAddress.parse(engine.tiers.offered_at).port
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n" + bytes(100), b"", os.urandom(3)):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            wire.receive(connection, wire.HELLO.size)
            connection.sendall(nonsense)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(5)
            try:
                while connection.recv(100):
                    pass
            except ConnectionResetError:
                pass  # it has left some of it unread
    store = store_of(engine, engine.tiers.offered_at)
    assert store.load([bytes(32)]) == [None]
    with pytest.raises(StoreFailed):
        store.load([bytes(32)] * (wire.MOST_KEYS + 1))
    assert store.load([bytes(32)]) == [None]
    store.close()


# --- the link between them ------------------------------------------------------------------------------------------


def linked(engines, links):
    first = engines(offers="tcp://127.0.0.1:0")
    link = links(first)
    first.ask(1, PROMPT, max_tokens=1)
    return link, engines(peers=[link.address])


def test_a_transfer_that_is_cut_keeps_what_came_and_computes_the_rest(engines, links):
    for cut_after in (0, 20, 60, 200, 500, 700):
        link, second = linked(engines, links)
        link.cut_after = cut_after
        answer, cached = second.ask(1, PROMPT, pages_from=link.address)
        assert answer == expected_tokens(PROMPT, 6)
        assert cached in range(0, 28, 4)
        assert second.peers[link.address].counts.failures == 1


def test_a_link_that_stands_still_is_given_up(engines, links):
    link, second = linked(engines, links)
    link.allowed = 300
    assert second.ask(1, PROMPT, pages_from=link.address) == (expected_tokens(PROMPT, 6), 0)
    assert link.stalled.is_set()
    assert not second.peers[link.address].is_up, "it is left alone for a while"
    assert second.ask(2, [7, *PROMPT], pages_from=link.address) == (expected_tokens([7, *PROMPT], 6), 0)


def test_damage_on_the_way_is_seen(engines, links):
    link, second = linked(engines, links)
    link.change = lambda data: data[:-1] + bytes([data[-1] ^ 1]) if len(data) > 300 else data
    answer, cached = second.ask(1, PROMPT, pages_from=link.address)
    assert (answer, cached) == (expected_tokens(PROMPT, 6), 24), "the last page of the seven"
    assert second.peers[link.address].counts.refused == 1


def test_an_engine_that_was_started_again_is_asked_anew(engines, tmp_path):
    address = f"shm://{tmp_path}/pages"
    first, second = pair(engines, address)
    first.ask(1, PROMPT, max_tokens=1)
    assert second.ask(1, PROMPT, pages_from=address)[1] == 28
    engines.made.remove(first)
    first.tiers.close()
    assert second.ask(2, [3, *PROMPT], pages_from=address) == (expected_tokens([3, *PROMPT], 6), 0)
    assert second.peers[address].counts.failures == 1
    again = engines(offers=address)
    again.ask(1, [4, *PROMPT], max_tokens=1)
    second.peers[address]._paused_until = 0.0
    assert second.ask(3, [4, *PROMPT], pages_from=address) == (expected_tokens([4, *PROMPT], 6), 28)


# --- addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["tcp://10.0.0.5:8201", "tcp://prefill-0.pages:1", "tcp://[::1]:9", "shm:///run/p"])
def test_addresses_are_read_as_they_are_written(text):
    assert str(PeerAddress.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "10.0.0.5:8201", "http://h:1", "tcp://h", "tcp://h:99999", "tcp://h:1/x", "tcp://u:p@h:1", "shm://p",
             "shm://h/p", "shm:///" + "p" * 108, "tcp://h:1?a=b"],
)  # fmt: skip
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match=r"tcp://HOST:PORT|too long"):
        PeerAddress.parse(text)


def test_nixl_needs_its_library(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'tierline\[nixl\]'"):
        PeerAddress.parse("nixl://host:1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert str(PeerAddress.parse("nixl://host:1")) == "nixl://host:1"


def test_who_asks_in_another_way_is_told_so(engines):
    pytest.importorskip("nixl")
    for offered, asked in (("tcp", "nixl"), ("nixl", "tcp")):
        engine = engines(offers=f"{offered}://127.0.0.1:0")
        where = engine.tiers.offered_at.replace(offered, asked)
        with pytest.raises(StoreFailed, match=f"it offers pages by {offered}://, not {asked}://"):
            store_of(engine, where).load([bytes(32)])


def test_an_address_that_is_taken_is_refused(engines):
    engine = engines(offers="tcp://127.0.0.1:0")
    with pytest.raises(ValueError, match=r"cannot listen on tcp://127\.0\.0\.1:\d+: Address already in use"):
        PeerAddress.parse(engine.tiers.offered_at).listen()
