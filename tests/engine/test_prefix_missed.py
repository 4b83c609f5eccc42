"""Why a prefix was not there, and pages that come from elsewhere."""

from engine.kv.cached_pages import Traffic
from engine.kv.prefix_cache import PrefixCache
from engine.kv.prefix_history import Absence
from engine.types import SamplingParams
from tests.engine.prefixes import compute, make_cache, make_request, use


def missed(cache: PrefixCache, tokens, salt: str | None = None) -> str | None:
    request = use(cache, tokens, salt)
    return None if request.missed is None else str(request.missed)


def test_why_a_prefix_was_not_there():
    cache = make_cache(num_blocks=9)  # 8 pages
    now = 100.0
    cache._history._clock = lambda: now
    assert missed(cache, range(13)) == "new; tokens=12"
    assert missed(cache, range(13)) is None
    assert missed(cache, [*range(8), 50, 51, 52, 53, 54]) == "new; tokens=4", "the text parts after two pages"
    assert cache.stats.missed_tokens == {Absence.NEW: 16, Absence.LAST_PAGE: 3}
    cache.stats.missed_tokens.clear()
    use(cache, range(200, 230))
    now = 107.5
    assert missed(cache, [*range(8), 50, 51, 52, 53, 54]) == "evicted; tokens=12; seconds-ago=7.5"
    assert cache.stats.missed_tokens[Absence.EVICTED] == 12


def test_another_tenants_text_counts_for_the_operator_but_is_not_told_to_the_client():
    cache = make_cache()
    use(cache, range(9), "a")
    request = use(cache, range(9), "b")
    assert request.missed.reason is Absence.OTHER_SALT
    assert str(request.missed) == "new; tokens=8"
    assert cache.stats.missed_tokens[Absence.OTHER_SALT] == 8
    for start in range(100, 2000, 20):  # until both are gone
        use(cache, range(start, start + 20))
    assert cache._history._first.keys() <= {entry.tokens for entry in cache._by_page.values()}
    assert use(cache, range(9), "c").missed.reason is Absence.NEW


def test_a_text_that_another_adapter_has_computed_is_told_apart_from_another_tenants():
    cache = make_cache()
    use(cache, range(9))
    request = make_request(cache, range(9))
    request.cache_root, request.adapter = cache.root(None, b"digest"), 1
    compute(cache, request)
    assert request.missed.reason is Absence.OTHER_ADAPTER
    assert str(request.missed) == "new; tokens=8"
    cache.check([request])


def test_what_does_not_look_up_says_so():
    cache = make_cache()
    seeded = make_request(cache, range(9))
    seeded.params = SamplingParams(seed=1)
    compute(cache, seeded)
    scored = make_request(cache, range(9))
    scored.params = SamplingParams(prompt_logprobs=0)
    compute(cache, scored)
    assert cache.stats.missed_tokens == {Absence.SEED: 9, Absence.SCORED: 9}
    assert cache.stats.queried_tokens == 0


def test_evictions_are_remembered_within_a_bound(monkeypatch):
    monkeypatch.setattr("engine.kv.prefix_history._MOST_REMEMBERED", 5)
    cache = make_cache(num_blocks=5)
    for start in range(0, 400, 20):
        use(cache, range(start, start + 13))
    assert len(cache._history._evicted) == 5


# --- pages that come from elsewhere --------------------------------------------------------------------------------


def test_inserted_pages_are_found_and_evict_no_page_of_their_own_text():
    cache = make_cache(num_blocks=6)  # 5 pages
    use(cache, range(9))
    use(cache, range(100, 109))
    text = make_request(cache, [*range(24), 1])
    pages = cache.insert(text, 6)
    assert len(pages) == 3, "two are here, and there are five pages in all"
    assert list(enumerate(cache.match(text)))[2:] == pages
    assert cache.match(make_request(cache, range(100, 109))) == []
    assert cache.insert(text, 4) == []
    cache.check([])


def test_a_page_whose_parent_went_before_it_is_reached_again_when_that_is_inserted():
    cache = make_cache()
    use(cache, range(13))
    text = make_request(cache, range(13))
    pages = cache.match(text)
    lost = cache._by_page.pop(pages[1])  # as if it had been evicted
    del cache._by_digest[lost.digest]
    assert len(cache.match(text)) == 1
    [(index, page)] = cache.insert(text, 3)
    assert index == 1
    assert cache.match(text) == [pages[0], page, pages[2]]


def test_inserted_pages_leave_those_in_use_alone():
    cache = make_cache(num_blocks=5)
    holder = make_request(cache, range(100, 112))
    compute(cache, holder)
    text = make_request(cache, range(9))
    assert len(cache.insert(text, 2)) == 1
    cache.check([holder])


def test_traffic_lists_new_pages_and_evicted_ones_that_were_hit_often_enough():
    cache = make_cache(num_blocks=9)
    cache.traffic = Traffic()
    use(cache, range(9))
    assert [entry.tokens for entry in cache.traffic.stored] == [
        cache.page_tokens(make_request(cache, range(9)), i) for i in (0, 1)
    ]
    for _ in range(2):
        use(cache, range(9))
    for start in range(100, 400, 20):
        use(cache, range(start, start + 32))
    assert len(cache.traffic.evicted) == 2, "the two that were found twice, and none of those that were found once"
    assert len(cache.traffic.stored) == 2 + 15 * 8
