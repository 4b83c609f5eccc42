"""`Cache-Control` and `x-tierline-cache`: read as RFC 9111 says, and never laxer than without them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cache_headers import NONE, Directives, read
from gateway.dialects.errors import BadRequest


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, NONE),
        ("", NONE),
        (" , ,", NONE),
        ("no-cache", Directives(no_cache=True)),
        ("No-Cache, NO-STORE", Directives(no_cache=True, no_store=True)),
        ("no-cache,no-store,only-if-cached", Directives(True, True, True)),
        ("max-age=60", Directives(max_age_s=60)),
        ('max-age="60"', Directives(max_age_s=60)),
        ("max-age=0", Directives(max_age_s=0)),
        ("max-age=00060", Directives(max_age_s=60)),
        ("max-age=99999999999999999999999", Directives(max_age_s=2**31)),
        ("max-age=4294967296", Directives(max_age_s=2**31)),
        # Of several the strictest; what cannot be read is no freshness at all.
        ("max-age=60, max-age=5", Directives(max_age_s=5)),
        ("max-age", Directives(max_age_s=0)),
        ("max-age=", Directives(max_age_s=0)),
        ("max-age=-1", Directives(max_age_s=0)),
        ("max-age=1.5", Directives(max_age_s=0)),
        ("max-age=²", Directives(max_age_s=0)),
        ("max-age=ten", Directives(max_age_s=0)),
        # Values where none belongs do not make it laxer.
        ('no-store="x"', Directives(no_store=True)),
        # Other words mean nothing: those of the RFC that only allow more, those of answers, those of nobody.
        ("max-stale=5, min-fresh=5, no-transform, private, x-unknown=1", NONE),
        ('x="no-cache, no-store", only-if-cached', Directives(only_if_cached=True)),
        ('x="\\", no-cache", no-store', Directives(no_store=True)),
        ('x="no-store', NONE),
        ("no-cachet, xno-store", NONE),
    ],
)
def test_cache_control(header: str | None, expected: Directives) -> None:
    assert read(header, None) == expected


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("no-cache", Directives(no_cache=True)),
        ("no-store, only-if-cached", Directives(no_store=True, only_if_cached=True)),
        ("max-age=30", Directives(max_age_s=30)),
        ("", NONE),
    ],
)
def test_our_own_header(header: str, expected: Directives) -> None:
    assert read(None, header) == expected


@pytest.mark.parametrize(
    "header", ["no-chache", "max-stale=5", "max-age", "max-age=", "max-age=x", "max-age=-1", "no-cache=1", "private"]
)
def test_our_own_header_takes_nothing_else(header: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read("no-store", f"no-store, {header}")
    assert refused.value.code == "invalid_cache_directive"
    assert "'x-tierline-cache'" in str(refused.value)


def test_the_strictest_of_both_counts() -> None:
    assert read("max-age=60, no-store", "max-age=5") == Directives(no_store=True, max_age_s=5)
    assert read("max-age=5", "no-cache, max-age=60") == Directives(no_cache=True, max_age_s=5)


@pytest.mark.parametrize(
    ("directives", "ttl_s", "oldest_s"),
    [
        (NONE, None, None),
        (NONE, 100.0, 100.0),
        (Directives(max_age_s=60), None, 60),
        (Directives(max_age_s=60), 100.0, 60),
        (Directives(max_age_s=600), 100.0, 100.0),
    ],
)
def test_a_client_shortens_how_long_an_answer_may_be_served_and_never_lengthens_it(
    directives: Directives, ttl_s: float | None, oldest_s: float | None
) -> None:
    assert directives.oldest_s(ttl_s) == oldest_s


words = st.sampled_from(["no-cache", "no-store", "only-if-cached", "max-age=0", "max-age=7", "max-age", "x", 'x="a,b"'])


@given(first=st.lists(words, max_size=4), second=st.lists(words, max_size=4))
def test_more_words_never_allow_more(first: list[str], second: list[str]) -> None:
    few, more = read(", ".join(first), None), read(", ".join([*first, *second]), None)
    assert more.no_cache >= few.no_cache
    assert more.no_store >= few.no_store
    assert more.only_if_cached >= few.only_if_cached
    assert few.max_age_s is None or (more.max_age_s is not None and more.max_age_s <= few.max_age_s)


@given(header=st.text(alphabet=st.characters(max_codepoint=255), max_size=60))
def test_whatever_stands_in_cache_control_is_no_error(header: str) -> None:
    read(header, None)
