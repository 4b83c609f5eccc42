"""Pages that were evicted from the cache and are kept in the host's pool."""

import pytest

from tests.engine.fakes import expected_tokens
from tests.engine.page_stores import DictStore, tiered_engines

PROMPT = list(range(1, 30))  # seven full pages of four, and one token


@pytest.fixture
def engines():
    yield from tiered_engines()


def fill(engine, numbers):
    """Prompts that come back once."""
    for number in numbers:
        for _ in range(2):
            engine.ask(number, [number, *range(300, 328)])


def test_what_was_found_often_enough_outlives_its_eviction(engines):
    store = DictStore(knows=True)
    engine = engines(host=store, num_blocks=17)
    for number in range(1, 4):
        engine.ask(number, PROMPT)
    fill(engine, range(40, 60))
    engine.cache.check([])
    assert len(store.values) == 7, "the pages that were found twice; answers and other prompts were not"
    assert engine.ask(70, PROMPT) == (expected_tokens(PROMPT, 6), 28)
    assert engine.host.counts.loaded == 7
    reads = engine.memory.reads
    fill(engine, range(80, 100))
    assert engine.memory.reads == reads, "they are there still, so they are not copied again"


def test_host_before_what_is_shared(engines):
    shared = DictStore()
    engines(shared=shared).ask(1, PROMPT)
    host = DictStore(dict(list(shared.values.items())[:3]))
    engine = engines(host=host, shared=DictStore(shared.values))
    assert engine.ask(1, PROMPT) == (expected_tokens(PROMPT, 6), 28)
    assert (engine.host.counts.loaded, engine.shared.counts.loaded) == (3, 4)
