"""What gateways tell each other of the beginnings that they send where, through a real Redis."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from backends.http import HttpClient
from backends.placement.chain import Chain
from backends.placement.index import PrefixIndex
from backends.pool import Pool
from bench.mock_upstream import MockUpstream
from bench.redis_server import RedisServer
from gateway.access.redis_channel import Channel
from gateway.counts import Counts
from gateway.flights.subscriber import Subscriber
from gateway.routing.shared_prefixes import SCRIPT, SharedPrefixes
from tests.gateway.front_door import PRICE, configuration, eventually, front_door

_prefixes = itertools.count()
URLS = ("http://one/v1", "http://two/v1")


def chain_of(name: str, links: int) -> Chain:
    return tuple((f"{name}{number}".encode().ljust(16, b"-"), 100 * (number + 1)) for number in range(links))


class Process:
    """What one gateway process has of it."""

    def __init__(self, shared: SharedPrefixes, pool: Pool, counts: Counts) -> None:
        assert pool.placer is not None
        assert pool.placer.index is not None
        self.shared, self.pool, self.index, self._counts = shared, pool, pool.placer.index, counts

    def told(self, outcome: str = "told") -> float:
        return self._counts.labels(outcome).value

    def sent(self, chain: Chain, replica: int) -> None:
        self.index.sent(chain, self.pool.replicas[replica], asyncio.get_running_loop().time())

    def hits(self, chain: Chain) -> dict[str, int]:
        now = asyncio.get_running_loop().time()
        return {replica.base_url: tokens for replica, tokens in self.index.hits(chain, now).items()}


@asynccontextmanager
async def process(url: str, prefix: str, most_bytes_per_s: int = 1 << 20) -> AsyncIterator[Process]:
    client = HttpClient()
    pool = Pool("up", URLS, client=client, prefixes=PrefixIndex(600.0, 100_000))
    channel = Channel(url, SCRIPT, prefix, 1.0)
    counts = Counts("told_total", "News.", ["outcome"], CollectorRegistry())
    shared = SharedPrefixes(
        channel,
        lambda heard: Subscriber(url, f"{prefix}:sent", heard),
        {"up": pool},
        counts,
        most_bytes_per_s=most_bytes_per_s,
    )
    await shared.start()
    try:
        yield Process(shared, pool, counts)
    finally:
        await shared.stop()
        await pool.aclose()
        await client.aclose()


@pytest.fixture
def prefix() -> str:
    return f"{{sent-{next(_prefixes)}}}"


@pytest.fixture
def own_server(redis_binary: str) -> Iterator[RedisServer]:
    server = RedisServer(redis_binary).start()
    yield server
    server.close()


async def test_what_one_sends_the_other_knows(redis_server: RedisServer, prefix: str) -> None:
    async with process(redis_server.url, prefix) as one, process(redis_server.url, prefix) as two:
        await two.shared.listening()
        first = chain_of("a", 5)
        one.sent(first[:3], 1)
        await eventually(lambda: two.hits(first) == {URLS[1]: 300})
        one.sent(first, 1)  # the next turn of it: only its end is news
        await eventually(lambda: two.hits(first) == {URLS[1]: 500})
        one.sent(first, 1)
        assert one.told() == 2
        assert two.hits(chain_of("b", 5)) == {}


async def test_a_turn_that_goes_through_the_other_gateway_is_no_news_of_its_beginning(
    redis_server: RedisServer, prefix: str
) -> None:
    async with process(redis_server.url, prefix) as one, process(redis_server.url, prefix) as two:
        await asyncio.gather(one.shared.listening(), two.shared.listening())
        chain = chain_of("a", 30)
        one.sent(chain[:29], 0)
        await eventually(lambda: two.hits(chain) == {URLS[0]: 2900})
        told: list[Chain] = []
        tell = two.index.tell
        assert tell is not None
        two.index.tell = lambda replica, part, before: (told.append(part), tell(replica, part, before))[1]
        two.sent(chain, 0)
        assert told == [chain[29:]]
        await eventually(lambda: one.hits(chain) == {URLS[0]: 3000})


async def test_beyond_its_bytes_a_process_tells_the_longest_beginnings_and_then_nothing(
    redis_server: RedisServer, prefix: str
) -> None:
    # Room for one of ten links and a few of one, and next to nothing that comes back meanwhile.
    async with process(redis_server.url, prefix) as two, process(redis_server.url, prefix, 400) as one:
        await two.shared.listening()
        chains = [chain_of(f"c{number}-", 10) for number in range(10)]
        for chain in chains:
            one.sent(chain, 0)
        assert one.told() == 1
        assert one.told("shortened") >= 1
        assert one.told("dropped") >= 5
        await eventually(lambda: two.hits(chains[1]) == {URLS[0]: 1000})
        assert two.hits(chains[-1]) == {}
        assert two.hits(chains[1][:9]) == {}  # of a shortened one only the whole is known


async def test_a_redis_that_goes_away_is_done_without_and_found_again(own_server: RedisServer, prefix: str) -> None:
    async with process(own_server.url, prefix) as one, process(own_server.url, prefix) as two:
        await two.shared.listening()
        own_server.kill()
        await eventually(lambda: not one.shared._channel.connected)
        lost = chain_of("lost", 3)
        one.sent(lost, 0)
        assert one.hits(lost) == {URLS[0]: 300}
        own_server.start()
        await eventually(lambda: one.shared._channel.connected)
        await two.shared.listening()
        again = chain_of("again", 3)
        one.sent(again, 1)
        await eventually(lambda: two.hits(again) == {URLS[1]: 300})
        assert two.hits(lost) == {}


async def test_two_gateways_send_a_conversation_to_one_replica(
    tmp_path: Path, upstream: MockUpstream, redis_server: RedisServer
) -> None:
    other = MockUpstream()
    await other.start()
    try:
        document = configuration({"up": upstream}, {"mock": {"tier": "small", "backend": "up", "price": PRICE}})
        document["backends"]["up"]["base_urls"] = [upstream.base_url, other.base_url]
        document["storage"] = {**document.get("storage", {}), "redis_url": redis_server.url}
        (tmp_path / "one").mkdir()
        (tmp_path / "two" / "var").mkdir(parents=True)
        async with front_door(tmp_path / "one", document) as one:
            (tmp_path / "two" / "var" / "secret").write_bytes((tmp_path / "one" / "var" / "secret").read_bytes())
            async with front_door(tmp_path / "two", document) as two:
                assert two.services.shared_prefixes is not None
                await two.services.shared_prefixes.listening()
                system = [{"role": "system", "content": f"You know {number} things. " * 200} for number in range(8)]
                homes = []
                for message in system:
                    answer = await one.chat(messages=[message, {"role": "user", "content": "One?"}])
                    assert answer.status_code == 200, answer.text
                    homes.append((await one.rows())[-1]["replica"])
                assert len(set(homes)) == 2
                index = two.services.pools["up"].placer.index  # type: ignore[union-attr]
                assert index is not None
                await eventually(lambda: sum(len(sent._beginnings) > 0 for sent in index._sent.values()) == 2)
                await asyncio.sleep(0.2)  # a message more, if there is one
                for message, home in zip(system, homes, strict=True):
                    answer = await two.chat(messages=[message, {"role": "user", "content": "Two?"}])
                    assert answer.status_code == 200, answer.text
                    row = (await two.rows())[-1]
                    assert (row["replica"], row["placed"].split()[0]) == (home, "prefix")
    finally:
        await other.stop()
