"""The prefix cache: what is found, what is not, and what each part of the key is for."""

import random

import pytest

from engine.kv.block_pool import BlockPool, PoolCorrupt
from engine.kv.prefix_cache import PrefixCache
from engine.scheduling.request import Request
from engine.types import SamplingParams
from tests.engine.prefixes import compute, make_cache, make_request, use


def test_a_second_request_takes_over_the_full_pages_but_never_the_last_token():
    cache = make_cache()
    first = make_request(cache, range(8))
    compute(cache, first)
    again = make_request(cache, range(8))
    assert cache.match(again) == first.block_table[:1], "8 tokens are 2 pages, but one token must be computed"
    longer = make_request(cache, range(9))
    assert cache.match(longer) == first.block_table[:2]
    assert cache.match(make_request(cache, [*range(4), 99, 5, 6, 7, 8])) == first.block_table[:1]
    assert cache.match(make_request(cache, [99, *range(1, 9)])) == []


def test_pages_are_found_only_after_publish():
    cache = make_cache()
    first = make_request(cache, range(9))
    cache.adopt(first, [], count=True)
    cache.extend(first, 9)
    assert cache.match(make_request(cache, range(9))) == []
    first.num_computed_tokens = 7
    cache.publish(first)
    assert len(cache.match(make_request(cache, range(9)))) == 1, "only the page that is full and computed"


def test_a_released_request_leaves_its_pages_to_others_and_release_is_idempotent():
    cache = make_cache()
    first = make_request(cache, range(9))
    compute(cache, first)
    pages = first.block_table[:2]
    cache.release(first)
    cache.release(first)
    assert (cache.pool.num_used, cache.pool.num_cached) == (0, 2)
    second = make_request(cache, range(9))
    cache.adopt(second, cache.match(second), count=True)
    assert second.block_table == pages
    assert (second.num_computed_tokens, cache.pool.num_cached) == (8, 0)
    cache.check([second])


def test_eviction_takes_the_end_of_the_oldest_chain_first():
    cache = make_cache(num_blocks=9)  # 8 pages
    old, young = make_request(cache, range(12)), make_request(cache, range(100, 112))
    for request in (old, young):
        compute(cache, request)
        cache.release(request)
    filler = make_request(cache, range(200, 212))
    compute(cache, filler)  # needs 3 pages: 2 are free, 1 is taken from `old`
    assert cache.stats.evicted_pages == 1
    assert len(cache.match(make_request(cache, [*range(12), 1]))) == 2, "its last page went first"
    assert len(cache.match(make_request(cache, [*range(100, 112), 1]))) == 3
    cache.check([filler])


def test_a_hit_makes_a_chain_young():
    cache = make_cache(num_blocks=7)  # 6 pages
    old, young = make_request(cache, range(12)), make_request(cache, range(100, 112))
    for request in (old, young):
        compute(cache, request)
        cache.release(request)
    touch = make_request(cache, [*range(12), 1])
    cache.adopt(touch, cache.match(touch), count=True)
    cache.release(touch)
    filler = make_request(cache, range(200, 204))
    compute(cache, filler)
    assert len(cache.match(make_request(cache, [*range(12), 1]))) == 3
    assert len(cache.match(make_request(cache, [*range(100, 112), 1]))) == 2


def test_pages_in_use_are_never_evicted():
    cache = make_cache(num_blocks=4)
    holder = make_request(cache, range(12))
    compute(cache, holder)
    assert not cache.extend(make_request(cache, range(50, 54)), 4)
    assert cache.stats.evicted_pages == 0


def test_fits_does_not_count_a_matched_idle_page_twice():
    cache = make_cache(num_blocks=4)  # 3 pages
    first = make_request(cache, range(8))
    compute(cache, first)
    cache.release(first)  # 2 cached, 1 free
    again = make_request(cache, range(16))
    matched = cache.match(again)
    assert len(matched) == 2
    assert cache.fits(12, matched)
    assert not cache.fits(13, matched), "two pages are its own already, one is free, a fourth is not there"


def test_equal_pages_computed_at_the_same_time_stay_private_and_balance():
    cache = make_cache()
    one, two = make_request(cache, range(9)), make_request(cache, range(9))
    for request in (one, two):
        cache.adopt(request, [], count=True)
        cache.extend(request, 9)
        request.num_computed_tokens = 9
        cache.publish(request)
    assert not set(one.block_table) & set(two.block_table)
    cache.check([one, two])
    cache.release(one)
    cache.release(two)
    cache.check([])
    assert (cache.pool.num_cached, cache.pool.num_free) == (2, 14)


def test_disabled_means_nothing_is_found_or_kept():
    cache = make_cache(enabled=False)
    first = make_request(cache, range(9))
    compute(cache, first)
    assert cache.match(make_request(cache, range(9))) == []
    cache.release(first)
    assert cache.pool.num_cached == 0
    assert cache.stats.queried_tokens == 0


def test_a_seeded_request_takes_nothing_over_but_leaves_its_pages_to_others():
    cache = make_cache()
    first = make_request(cache, range(9))
    first.params = SamplingParams(seed=7)
    compute(cache, first)
    again = make_request(cache, range(9))
    again.params = SamplingParams(seed=7)
    assert cache.match(again) == []
    again.params = SamplingParams(seed=7, temperature=0.0)
    assert len(cache.match(again)) == 2, "greedy decoding draws nothing"
    assert len(cache.match(make_request(cache, range(9)))) == 2


def test_statistics_count_tokens():
    cache = make_cache()
    for _ in range(2):
        request = make_request(cache, range(10))
        compute(cache, request)
        cache.release(request)
    assert (cache.stats.queried_tokens, cache.stats.hit_tokens) == (20, 8)


def test_adopting_into_a_request_that_holds_pages_is_refused():
    cache = make_cache()
    request = make_request(cache, range(9))
    compute(cache, request)
    with pytest.raises(PoolCorrupt, match="already holds pages"):
        cache.adopt(request, [], count=False)


# --- the key: removing any component must fail one of these -----------------------------------------------------


def roots() -> list[bytes]:
    return [
        make_cache().root(None),
        make_cache(model=b"other").root(None),
        make_cache(kv_dtype="bfloat16").root(None),
        make_cache().root("tenant a"),
        make_cache().root("tenant b"),
        make_cache().root(""),
        # Untagged concatenation would confuse these with others above.
        make_cache(model=b"mkv_dtype").root(None),
        make_cache(kv_dtype="float32salt:").root(None),
        make_cache(model=b"", kv_dtype="mfloat32").root(None),
        make_cache(model=b"akv_dtypeb", kv_dtype="c").root(None),
        make_cache(model=b"a", kv_dtype="bkv_dtypec").root(None),
    ]


def test_model_data_type_and_salt_each_separate_the_chains():
    assert len(set(roots())) == len(roots())
    assert make_cache().root("tenant a") == make_cache().root("tenant a")


def test_other_tenants_pages_are_not_found():
    cache = make_cache()
    compute(cache, make_request(cache, range(9), salt="a"))
    assert len(cache.match(make_request(cache, range(9), salt="a"))) == 2
    assert cache.match(make_request(cache, range(9), salt="b")) == []
    assert cache.match(make_request(cache, range(9))) == []


def test_the_parent_separates_equal_pages():
    cache = make_cache()
    one = make_request(cache, [*range(4), *range(50, 54), 1])
    other = make_request(cache, [*range(10, 14), *range(50, 54), 1])
    compute(cache, one)
    compute(cache, other)
    assert one.page_digests[1] != other.page_digests[1]
    assert cache.match(make_request(cache, other.token_ids)) == other.block_table[:2]


def test_the_order_of_tokens_and_every_single_token_counts():
    cache = make_cache()
    base = make_request(cache, range(5))
    compute(cache, base)
    for position in range(4):
        changed = list(range(5))
        changed[position] += 65536  # a token id that differs in its high bytes only
        assert cache.match(make_request(cache, changed)) == []
    assert cache.match(make_request(cache, [1, 0, 2, 3, 4])) == []


def test_each_process_has_its_own_random_seed():
    plain = [PrefixCache(BlockPool(2), 4, model_digest=b"m", kv_dtype="f").root(None) for _ in range(2)]
    assert plain[0] != plain[1]


@pytest.mark.parametrize("constant", ["all", "pages"])
def test_a_hash_collision_is_a_miss_and_never_a_wrong_page(constant, monkeypatch):
    cache = make_cache()
    real = cache._digest

    def collide(*parts: bytes) -> bytes:
        # "pages": every page collides, roots do not; "all": everything collides.
        return real(*parts) if constant == "pages" and len(parts) > 2 else b"the same for all"

    monkeypatch.setattr(cache, "_digest", collide)
    first = make_request(cache, range(9), salt="a")
    compute(cache, first)
    assert cache.match(make_request(cache, range(100, 109), salt="a")) == [], "other tokens"
    if constant == "pages":
        assert cache.match(make_request(cache, range(9), salt="b")) == [], "other parent, same tokens"


# --- recency and frequency ---------------------------------------------------------------------------------------


def test_a_prompt_that_comes_back_outlives_a_flood_of_those_that_do_not():
    cache = make_cache(num_blocks=17)  # 16 pages
    use(cache, range(13))
    use(cache, range(13))
    for start in range(100, 1100, 20):
        use(cache, range(start, start + 13))
    assert len(cache.match(make_request(cache, range(13)))) == 3
    cache.check([])


def test_resuming_after_a_preemption_is_not_coming_back():
    cache = make_cache(num_blocks=17)
    request = use(cache, range(13))
    cache.adopt(request, cache.match(request), count=False)
    cache.release(request)
    for start in range(100, 300, 20):
        use(cache, range(start, start + 13))
    assert cache.match(make_request(cache, range(13))) == []


def test_a_parent_is_never_evicted_before_its_child():
    rng = random.Random(3)
    cache = make_cache(num_blocks=33)
    held: list[Request] = []
    for _ in range(3000):
        if held and rng.random() < 0.5:
            cache.release(held.pop(rng.randrange(len(held))))
        elif len(held) < 3:
            tokens = [rng.choice([0, 0, 0, 1]) for _ in range(rng.randrange(4, 32))]
            request = make_request(cache, tokens)
            # One that is computed beside an equal one has private copies, whose children may be orphans.
            if not any(other.token_ids[:4] == tokens[:4] for other in held):
                compute(cache, request)
                held.append(request)
        known = {entry.digest for entry in cache._by_page.values()}
        assert all(entry.first or entry.parent in known for entry in cache._by_page.values())
    assert cache.stats.evicted_pages > 200
    cache.check(held)
