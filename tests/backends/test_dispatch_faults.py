"""Faults before the first content: what is retried where, what falls back, what the client is told."""

from __future__ import annotations

import time

import pytest

from backends.dispatch import NoBackend
from tests.backends.reading import drain

FAULTS = {
    "status,status=500": "error",
    "status,status=503": "error",
    "status,status=429": "error",
    "status,status=408": "error",
    "status,status=302": "error",
    "close": "error",
    "cut": "error",
    "end": "error",
    "error": "error",
    "garbage": "error",
    "hang": "timeout",
    "stall": "timeout",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_every_early_fault_falls_back(bench, mock, second, fault, stream):
    bench.pool("main", mock, attempts=1, first_token_s=0.2, total_s=10 if stream else 0.3)
    bench.pool("other", second)
    answer = await bench.open(fault, "mock@other", stream=stream)
    if stream:
        assert await drain(answer)
    assert answer.attempt.number == 2
    assert answer.attempt.replica == second.base_url
    assert bench.outcomes() == [FAULTS[fault], "success"]
    assert bench.observer.ended == bench.observer.started[:1]
    assert bench.observer.ended[0].error
    assert bench.observer.ended[0].duration_s is not None


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_a_fault_is_retried_on_the_same_replica_if_there_is_no_other(bench, mock, stream):
    bench.pool("main", mock, attempts=3)
    answer = await bench.open("status,status=500,times=2", stream=stream)
    await answer.aclose()
    assert bench.outcomes()[:2] == ["error", "error"]
    assert answer.attempt.number == 3


async def test_retry_goes_to_another_replica_without_waiting(bench, mock, second):
    bench.pool("main", mock, second, attempts=2)
    mock.override = "status,status=500"
    second.override = "status,status=500"
    with pytest.raises(NoBackend):
        await bench.open(stream=False)
    assert mock.requests == second.requests == 1
    first, again = bench.observer.started
    assert again.started - first.started < 0.05


async def test_a_silent_replica_is_not_asked_twice(bench, mock):
    bench.pool("main", mock, attempts=3, first_token_s=0.15)
    with pytest.raises(NoBackend) as caught:
        await bench.open("hang")
    assert (caught.value.kind, caught.value.status) == ("timeout", 504)
    assert mock.requests == 1


async def test_keep_alive_comments_are_no_tokens(bench, mock):
    bench.pool("main", mock, attempts=1, first_token_s=0.3)
    began = time.monotonic()
    with pytest.raises(NoBackend) as caught:
        await bench.open("mock,pings=100,interval_ms=20")
    assert caught.value.kind == "timeout"
    assert time.monotonic() - began < 1.0


# What is given up, and how.


@pytest.mark.parametrize(
    ("model", "kind", "status"),
    [
        ("status,status=500", "upstream_error", 502),
        ("status,status=429", "rate_limited", 429),
        ("cut", "upstream_error", 502),
        ("garbage", "upstream_error", 502),
        ("error", "upstream_error", 502),
        ("error,code=429", "rate_limited", 429),
    ],
)
async def test_what_is_said_when_all_is_exhausted(bench, mock, model, kind, status):
    bench.pool("main", mock, attempts=2)
    with pytest.raises(NoBackend) as caught:
        await bench.open(model)
    assert (caught.value.kind, caught.value.status) == (kind, status)
    assert caught.value.attempts == bench.observer.started == bench.observer.ended
    assert len(caught.value.attempts) == 2
    assert mock.base_url not in str(caught.value)


async def test_nobody_listens(bench, refused_url):
    bench.pool("main", refused_url)
    with pytest.raises(NoBackend) as caught:
        await bench.open()
    assert (caught.value.kind, caught.value.status) == ("unavailable", 503)
    assert "cannot connect" in caught.value.attempts[0].error


async def test_fallback_follows_the_order_of_candidates(bench, mock, second):
    bench.pool("main", mock, attempts=1)
    bench.pool("other", second, attempts=1)
    answer = await bench.open("status@main", "cut@other", "status,status=503@main", "mock@other", "mock@main")
    await answer.aclose()
    assert [a.candidate.upstream_model for a in bench.observer.started] == [
        "status",
        "cut",
        "status,status=503",
        "mock",
    ]
    assert [a.number for a in bench.observer.started] == [1, 2, 3, 4]


async def test_an_error_never_quotes_the_upstream_message(bench, mock):
    bench.pool("main", mock, attempts=1)
    for model in ("status,status=500", "error"):
        with pytest.raises(NoBackend) as caught:
            await bench.open(model)
        assert "mock_error" in caught.value.attempts[0].error
        assert "the mock was asked" not in caught.value.attempts[0].error
        assert "mid-stream" not in caught.value.attempts[0].error


async def test_full_replicas_refuse_at_once_and_say_when_to_come_back(bench, mock):
    bench.pool("main", mock, max_outstanding=1, max_queued=0)
    first = await bench.open("mock,interval_ms=1000")
    with pytest.raises(NoBackend) as caught:
        await bench.open()
    assert (caught.value.kind, caught.value.status, caught.value.retry_after) == ("overloaded", 503, 1.0)
    assert caught.value.attempts == []
    assert str(caught.value) == "No server was asked: each has as many requests as it may have."
    await first.aclose()
    await drain(await bench.open())


# Retry-After.


async def test_retry_after_is_honoured_within_patience(bench, mock):
    bench.pool("main", mock, attempts=2)
    answer = await bench.open("status,status=429,retry_after=0.4,times=1", stream=False)
    first, again = bench.observer.started
    assert answer.attempt is again
    assert again.started - first.started >= 0.4


async def test_a_long_retry_after_is_handed_to_the_client(bench, mock):
    bench.pool("main", mock, attempts=2)
    with pytest.raises(NoBackend) as caught:
        await bench.open("status,status=429,retry_after=30")
    assert (caught.value.kind, caught.value.retry_after) == ("rate_limited", 30)
    assert mock.requests == 1


async def test_retry_after_beyond_the_deadline_is_not_waited_for(bench, mock):
    bench.pool("main", mock, attempts=2)
    began = time.monotonic()
    with pytest.raises(NoBackend) as caught:
        await bench.open("status,status=503,retry_after=2", deadline=began + 0.5)
    assert caught.value.retry_after == 2
    assert time.monotonic() - began < 0.4


async def test_another_candidate_is_better_than_waiting(bench, mock, second):
    bench.pool("main", mock, attempts=2)
    bench.pool("other", second)
    began = time.monotonic()
    await bench.open("status,status=429,retry_after=3", "mock@other", stream=False)
    assert time.monotonic() - began < 1.0
