"""The page pool: three states, one law, clear errors."""

import pytest

from engine.kv.block_pool import BlockPool, PoolCorrupt


def test_pages_move_between_free_used_and_cached():
    pool = BlockPool(5)
    assert (pool.total, pool.num_free, pool.num_cached, pool.num_used) == (4, 4, 0, 0)
    page = pool.take()
    pool.keep(page)
    pool.acquire(page)
    assert pool.ref_count(page) == 2
    pool.release(page)
    assert pool.num_used == 1
    pool.release(page)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (3, 1, 0)
    pool.acquire(page)
    assert (pool.num_cached, pool.num_used) == (0, 1)
    pool.release(page)
    assert pool.drop_oldest_cached() == page
    assert (pool.num_free, pool.num_cached) == (4, 0)
    pool.check([])


def test_the_null_page_is_never_handed_out():
    pool = BlockPool(4)
    assert sorted(pool.take() for _ in range(3)) == [1, 2, 3]
    with pytest.raises(IndexError):
        pool.take()


def test_cached_pages_are_dropped_oldest_first_and_a_reacquired_one_becomes_young():
    pool = BlockPool(4)
    a, b, c = (pool.take() for _ in range(3))
    for page in (a, b, c):
        pool.keep(page)
        pool.release(page)
    pool.acquire(a)
    pool.release(a)
    assert [pool.drop_oldest_cached() for _ in range(3)] == [b, c, a]


def test_a_dropped_page_is_no_longer_kept():
    pool = BlockPool(2)
    page = pool.take()
    pool.keep(page)
    pool.release(page)
    pool.drop_oldest_cached()
    assert pool.take() == page
    pool.release(page)
    assert (pool.num_free, pool.num_cached) == (1, 0)


def test_misuse_is_an_error_that_names_the_page():
    pool = BlockPool(3)
    with pytest.raises(PoolCorrupt, match="page 1 was released more often"):
        pool.release(1)
    with pytest.raises(PoolCorrupt, match="page 1 was acquired although it is free"):
        pool.acquire(1)
    with pytest.raises(PoolCorrupt, match="page 1 was published"):
        pool.keep(1)
    with pytest.raises(ValueError, match="at least 2 pages"):
        BlockPool(1)


def test_check_finds_a_leak_a_double_state_and_a_wrong_count():
    pool = BlockPool(4)
    page = pool.take()
    pool.check([[page]])
    with pytest.raises(PoolCorrupt, match="disagree"):
        pool.check([[page], [page]])
    with pytest.raises(PoolCorrupt, match="disagree"):
        pool.check([])
    pool._free.pop()
    with pytest.raises(PoolCorrupt, match="!= total 3"):
        pool.check()
    pool._free.append(page)
    with pytest.raises(PoolCorrupt, match="two states"):
        pool.check()


def test_pages_that_somebody_came_back_for_outlive_those_used_once():
    pool = BlockPool(11)
    pages = [pool.take() for _ in range(10)]
    for page in pages:
        pool.keep(page)
    pool.favour(pages[0])
    pool.favour(pages[3])
    for page in pages:
        pool.release(page)
    dropped = [pool.drop_oldest_cached() for _ in range(10)]
    assert dropped == [*(p for p in pages if p not in (pages[0], pages[3])), pages[0], pages[3]]
    pool.check([])


def test_the_protected_queue_has_a_bound_and_what_it_pushes_out_is_young_on_probation():
    pool = BlockPool(11)  # at most 2 of 10 are protected
    pages = [pool.take() for _ in range(10)]
    for page in pages:
        pool.keep(page)
    for page in pages[1:4]:
        pool.favour(page)
    for page in pages:
        pool.release(page)
        pool.check()
    assert pool.drop_oldest_cached() == pages[0]
    assert pool.drop_oldest_cached() == pages[1], "pushed out by the third, before those that came after that"
    assert [pool.drop_oldest_cached() for _ in range(8)] == [*pages[4:], *pages[2:4]], "the protected go last"
    with pytest.raises(PoolCorrupt, match="was taken over although nobody holds it"):
        pool.favour(pages[3])


def test_a_page_that_was_pushed_out_must_prove_itself_anew():
    pool = BlockPool(6)  # at most 1 of 5 is protected
    a, b = pool.take(), pool.take()
    for page in (a, b):
        pool.keep(page)
        pool.favour(page)
        pool.release(page)
    pool.acquire(a)
    pool.release(a)
    assert pool.drop_oldest_cached() == a
