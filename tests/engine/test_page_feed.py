"""What the engine tells of its pages: a mirror that follows knows what the cache holds, and what a prompt ended in."""

import json
import random

import pytest

from engine.kv.cached_pages import TOLD_BYTES
from engine.kv.page_feed import MAX_READERS, MOST_BEHIND, Change, PageFeed, Snapshot
from engine.kv.page_seed import VARIABLE, page_seed
from engine.messages import NewRequest, Pages
from engine.types import SamplingParams
from tests.engine.fakes import FakeRunner, make_scheduler, step
from tests.engine.serving import MODEL


class Mirror:
    """What a reader makes of the events. Fails where one does not follow the other."""

    def __init__(self):
        self.pages = {}
        self.sequence = None
        self.snapshots = 0
        self._more = False

    def take(self, event):
        if isinstance(event, Snapshot):
            if not self._more:
                self.pages = {}
                self.snapshots += 1
            self._more = event.more
            self.sequence = event.sequence
            self.pages.update(event.pages)
            return
        assert isinstance(event, Change)
        assert event.after == self.sequence
        self.sequence = event.sequence
        for page in event.removed:
            del self.pages[page]
        self.pages.update(event.stored)


def held(cache):
    return {entry.digest[:TOLD_BYTES].hex() for entry in cache._by_digest.values()}


async def test_a_reader_knows_the_cache_through_publication_and_eviction():
    runner = FakeRunner(num_blocks=17)
    scheduler = make_scheduler(runner)
    feed, mirror, rng = PageFeed(), Mirror(), random.Random(7)
    feed.begin(scheduler.cache.space.hex(), 4)
    reader = feed.read()
    mirror.take(await reader.next())
    for number in range(60):
        prompt = [rng.randrange(1, 3) for _ in range(rng.randrange(1, 24))]
        scheduler.add([NewRequest(number, prompt, SamplingParams(max_tokens=3))])
        while scheduler.has_work:
            step(scheduler, runner)
            news = scheduler.cache.news()
            if news is not None:
                feed.apply(Pages(*news))
                if rng.random() < 0.7:
                    mirror.take(await reader.next())
    if mirror.sequence != feed.sequence:
        mirror.take(await reader.next())
    assert scheduler.cache.stats.evicted_pages > 50
    assert set(mirror.pages) == held(scheduler.cache)
    assert mirror.snapshots == 1
    late = Mirror()
    late.take(await feed.read().next())
    assert late.pages == mirror.pages


async def test_chains_lead_from_the_page_of_a_prompt_to_its_beginning():
    runner = FakeRunner()
    scheduler = make_scheduler(runner)
    scheduler.add([NewRequest(1, list(range(1, 11)), SamplingParams(max_tokens=1), cache_salt="a team")])
    outputs = []
    while scheduler.has_work:
        outputs += step(scheduler, runner)
    [page] = [output.prompt_page for output in outputs if output.prompt_page]
    parents = dict(scheduler.cache.news().stored)
    chain = [page]
    while parents[chain[-1]]:
        chain.append(parents[chain[-1]])
    assert len(chain) == 2, "ten tokens are two full pages of four"
    assert scheduler.cache.news() is None


def test_a_prompt_without_a_full_page_has_none():
    runner = FakeRunner()
    scheduler = make_scheduler(runner)
    scheduler.add([NewRequest(1, [1, 2, 3], SamplingParams(max_tokens=4))])
    outputs = []
    while scheduler.has_work:
        outputs += step(scheduler, runner)
    assert [output.prompt_page for output in outputs] == [None] * 4


async def test_who_reads_too_slowly_begins_anew():
    feed, mirror = PageFeed(), Mirror()
    feed.begin("space", 4)
    reader = feed.read()
    mirror.take(await reader.next())
    for number in range(MOST_BEHIND + 1):
        feed.apply(Pages([], [(number.to_bytes(4, "big"), b"")]))
    while len(mirror.pages) <= MOST_BEHIND:
        mirror.take(await reader.next())
    assert mirror.snapshots == 2
    feed.apply(Pages([(1).to_bytes(4, "big")], []))
    mirror.take(await reader.next())
    assert len(mirror.pages) == MOST_BEHIND


async def test_another_core_begins_with_nothing():
    feed, mirror = PageFeed(), Mirror()
    feed.begin("one", 4)
    feed.apply(Pages([], [(b"page", b"")]))
    reader = feed.read()
    first = await reader.next()
    assert first.space == "one"
    assert first.pages == [(b"page".hex(), "")]
    feed.lose()
    feed.begin("two", 4)
    second = await reader.next()
    assert second.space == "two"
    assert second.pages == []
    mirror.take(second)
    feed.close()
    assert await reader.next() is None


def test_readers_are_bounded():
    feed = PageFeed()
    readers = [feed.read() for _ in range(MAX_READERS)]
    assert feed.read() is None
    feed.leave(readers[0])
    assert feed.read() is not None


def test_pages_of_engines_with_one_seed_can_be_compared(monkeypatch):
    from engine.kv.block_pool import BlockPool
    from engine.kv.prefix_cache import PrefixCache

    def space(seed, model=b"m", block_size=4):
        return PrefixCache(BlockPool(3), block_size, model_digest=model, kv_dtype="f", seed=seed).space

    monkeypatch.setenv(VARIABLE, "ab" * 32)
    seed = page_seed()
    assert space(seed) == space(seed)
    assert len({space(seed), space(seed, b"other"), space(seed, block_size=8), space(None), space(None)}) == 5
    monkeypatch.delenv(VARIABLE)
    assert page_seed() is None


@pytest.mark.parametrize("text", ["ab" * 31, "zz" * 32, "secret"])
def test_a_seed_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        page_seed()


def test_the_server_tells_its_pages_and_where_a_prompt_ends(server):
    prompt = "It was a bright cold day in April, and the clocks were striking thirteen. " * 8
    pages, sequence, size = {}, 0, 0
    with server.http.stream("GET", "/v1/kv_events") as events:
        lines = events.iter_lines()
        assert events.headers["content-type"].startswith("text/event-stream")
        answer = server.post("/v1/completions", prompt=prompt, max_tokens=1, cache_salt="events")
        page = answer.headers["x-tierline-prompt-page"]
        tokens = answer.json()["usage"]["prompt_tokens"]
        while page not in pages:
            line = next(lines)
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert event.get("after", sequence) == sequence or "pages" in event
            sequence = event["sequence"]
            size = event.get("page_tokens") or size
            for gone in event.get("removed", []):
                del pages[gone]
            pages.update(event.get("pages", event.get("stored")))
    chain = [page]
    while pages[chain[-1]]:
        chain.append(pages[chain[-1]])
    assert len(chain) == tokens // size
    streamed = server.http.stream(
        "POST",
        "/v1/completions",
        json={"model": MODEL, "prompt": prompt, "max_tokens": 1, "stream": True, "cache_salt": "events"},
    )
    with streamed as response:
        assert response.headers["x-tierline-prompt-page"] == page
    other = server.post("/v1/completions", prompt=prompt, max_tokens=1, cache_salt="another")
    assert other.headers["x-tierline-prompt-page"] != page, "tenants share no pages"
