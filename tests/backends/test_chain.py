"""The way of a call through its candidates: what is tried next, what is not, and where it ends."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from backends.attempt import AttemptFailed
from backends.dispatch import Dispatcher, Limits, NoBackend, UpstreamRefused
from bench.mock_upstream import MockUpstream
from bench.mock_wire import OpenAIWire, Record, http_answer

TOO_LONG = (
    b'{"error":{"message":"This model\'s maximum context length is 64 tokens.","type":"BadRequestError","code":400}}'
)
BLOCKED = b'{"error":{"message":"filtered","type":"invalid_request_error","code":"content_filter"}}'


class Refusing(OpenAIWire):
    """A server that refuses every request in these words."""

    def __init__(self, body: bytes, status: int = 400) -> None:
        self.body = body
        self.status = status

    def refusal(self, record: Record) -> bytes | None:
        return http_answer(self.status, self.body)


@pytest.fixture
async def refusing():
    """Start servers that refuse."""
    servers = []

    async def start(body: bytes, status: int = 400) -> MockUpstream:
        server = MockUpstream(Refusing(body, status))
        await server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.stop()


def contexts(*lengths: int) -> list[dict[str, int]]:
    return [{"context_length": length} for length in lengths]


# Refusals that another candidate may take.


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_a_prompt_that_is_too_long_goes_to_a_longer_context(bench, mock, second, refusing, stream):
    bench.pool("main", await refusing(TOO_LONG), attempts=3)
    bench.pool("short", second)
    bench.pool("long", mock)
    answer = await bench.open("a", "b@short", "c@long", stream=stream, about=contexts(64, 64, 128))
    assert answer.attempt.replica == mock.base_url
    assert second.requests == 0
    assert bench.outcomes()[0] == "refused"
    assert len(bench.observer.started) == 2
    await answer.aclose()


async def test_if_no_context_is_longer_the_refusal_goes_back(bench, mock, refusing):
    bench.pool("main", await refusing(TOO_LONG))
    bench.pool("short", mock)
    for lengths in (contexts(64, 64), contexts(64, 0), contexts(0, 0)):
        with pytest.raises(UpstreamRefused) as caught:
            await bench.open("a", "b@short", about=lengths)
        assert caught.value.said["code"] == "context_length_exceeded"
    assert mock.requests == 0


async def test_the_last_of_several_refusals_goes_back(bench, refusing):
    bench.pool("main", await refusing(TOO_LONG))
    bench.pool("long", await refusing(TOO_LONG.replace(b"64", b"128")))
    with pytest.raises(UpstreamRefused) as caught:
        await bench.open("a", "b@long", about=contexts(64, 128))
    assert "128" in caught.value.said["message"]
    assert bench.outcomes() == ["refused", "refused"]


async def test_a_refusal_counts_more_than_a_failure_after_it(bench, refusing, refused_url):
    bench.pool("main", await refusing(TOO_LONG))
    bench.pool("long", refused_url, attempts=1)
    with pytest.raises(UpstreamRefused):
        await bench.open("a", "b@long", about=contexts(64, 128))


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_blocked_content_goes_to_another_backend(bench, mock, second, refusing, stream):
    bench.pool("main", await refusing(BLOCKED))
    bench.pool("other", mock)
    answer = await bench.open("a", "b", "c@other", stream=stream)
    assert answer.attempt.replica == mock.base_url
    assert bench.outcomes()[0] == "refused"
    assert len(bench.observer.started) == 2  # the second model of the same backend was not asked
    await answer.aclose()


@pytest.mark.parametrize("status", [400, 404, 409, 413, 422])
async def test_no_other_refusal_is_retried(bench, mock, refusing, status):
    bench.pool("main", await refusing(b'{"error":{"message":"no such tool","code":"invalid_value"}}', status))
    bench.pool("other", mock)
    with pytest.raises(UpstreamRefused):
        await bench.open("a", "b@other", about=contexts(64, 128))
    assert mock.requests == 0


async def test_an_error_in_vllm_s_older_form_is_understood(bench, refusing):
    body = {"object": "error", "message": "too long: context length", "type": "BadRequestError", "code": 400}
    bench.pool("main", await refusing(msgspec.json.encode(body)))
    with pytest.raises(UpstreamRefused) as caught:
        await bench.open()
    assert caught.value.said["code"] == "context_length_exceeded"


# Bounds.


async def test_attempts_are_bounded_over_all_candidates(bench, mock, second):
    bench.dispatcher = Dispatcher(bench.pools, Limits(max_attempts=3))
    bench.pool("main", mock, attempts=2)
    bench.pool("other", second, attempts=2)
    with pytest.raises(NoBackend) as caught:
        await bench.open("status", "close@other", "status@other")
    assert len(caught.value.attempts) == 3


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_time_is_bounded_over_all_candidates(bench, mock, second, stream):
    bench.dispatcher = Dispatcher(bench.pools, Limits(total_s=0.5))
    bench.pool("main", mock, first_token_s=0.3, total_s=0.3)
    bench.pool("other", second, first_token_s=5, total_s=5)
    with pytest.raises(NoBackend) as caught:
        await bench.open("hang", "hang@other", "hang@other", stream=stream)
    assert (caught.value.kind, caught.value.status) == ("deadline", 504)
    assert bench.outcomes() == ["timeout", "timeout"]
    assert caught.value.attempts[1].duration_s < 2
    assert bench.pools["other"].snapshot()[0].failures_total == 0  # it had less time than it may have


async def test_a_client_that_leaves_between_attempts_ends_the_chain(bench, mock, second, eventually):
    bench.pool("main", mock, attempts=5)
    bench.pool("other", second)
    task = asyncio.create_task(bench.open("status,status=503", "mock@other"))
    await eventually(lambda: len(bench.observer.ended) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert second.requests == 0
    assert bench.outcomes() == ["error"]


# Retries keep to their share.


async def test_an_outage_is_not_multiplied(bench, mock, monkeypatch):
    monkeypatch.setattr("backends.chain.BACK_OFF_S", 0.001)
    monkeypatch.setattr("backends.pool.RETRY_RESERVE", 5.0)
    monkeypatch.setattr("backends.pool.RETRIES_PER_S", 0.0)
    pool = bench.pool("main", mock, attempts=3, retry_share=0.1)
    for _ in range(50):
        with pytest.raises(NoBackend):
            await bench.open("close", stream=False)
    assert 50 < mock.requests <= 50 + 5 + 5
    assert pool.retries.spent == mock.requests - 50
    assert pool.retries.refused > 0


async def test_a_fallback_to_another_backend_is_no_retry(bench, mock, second):
    pool = bench.pool("main", mock, attempts=3, retry_share=0)
    bench.pool("other", second, retry_share=0)
    for _ in range(20):
        await bench.open("status", "mock@other", stream=False)
    assert pool.retries.spent == 0
    assert second.requests == 20


async def test_another_model_of_the_same_backend_is_a_retry(bench, mock):
    pool = bench.pool("main", mock, attempts=1)
    await bench.open("status", "mock", stream=False)
    assert pool.retries.spent == 1


async def test_another_model_of_a_silent_backend_is_asked(bench, mock):
    bench.pool("main", mock, attempts=2, first_token_s=0.2)
    answer = await bench.open("hang", "mock")
    assert bench.outcomes()[0] == "timeout"
    assert answer.attempt.number == 2
    await answer.aclose()


# Retry-After.


async def test_a_resting_backend_is_left_alone_by_the_next_request_too(bench, mock):
    bench.pool("main", mock, attempts=2)
    for _ in range(3):
        with pytest.raises(NoBackend) as caught:
            await bench.open("status,status=429,retry_after=30")
        assert (caught.value.status, caught.value.kind) == (429, "rate_limited")
        assert 29 < caught.value.retry_after <= 30
    assert mock.requests == 1
    assert "for a while" in str(caught.value)


async def test_a_resting_backend_that_was_overloaded_says_so(bench, mock):
    bench.pool("main", mock, attempts=2)
    for attempts in (1, 0):
        with pytest.raises(NoBackend) as caught:
            await bench.open("status,status=503,retry_after=30")
        assert len(caught.value.attempts) == attempts
        assert caught.value.retry_after == pytest.approx(30, abs=1)
        assert (caught.value.status, caught.value.kind) == (503, "overloaded")
    assert "for a while" in str(caught.value)


async def test_an_unavailable_server_that_does_not_say_for_how_long_has_failed(bench, mock):
    bench.pool("main", mock, attempts=1)
    with pytest.raises(NoBackend) as caught:
        await bench.open("status,status=503")
    assert (caught.value.status, caught.value.kind, caught.value.retry_after) == (502, "upstream_error", None)


async def test_the_next_request_waits_for_a_short_rest(bench, mock):
    bench.pool("main", mock, attempts=1)
    began = time.monotonic()
    with pytest.raises(NoBackend):
        await bench.open("status,status=503,retry_after=0.4,times=1")
    answer = await bench.open(stream=False)
    assert answer.attempt.started - began >= 0.4
    assert bench.outcomes() == ["error", "success"]


async def test_a_backend_that_is_down_says_when_to_come_back(bench, refused_url):
    bench.pool("main", refused_url, attempts=1)
    with pytest.raises(NoBackend) as caught:
        await bench.open()
    assert caught.value.kind == "unavailable"
    assert 0.5 < caught.value.retry_after < 1.5


# The order of candidates is that of the moment.


async def test_a_backend_that_is_down_is_tried_last(bench, mock, second):
    main = bench.pool("main", mock)
    bench.pool("other", second)
    main.failed(main.replicas[0], AttemptFailed("connect", "refused"))
    answer = await bench.open("mock", "mock@other", stream=False)
    assert answer.attempt.replica == second.base_url
    second.override = "status"
    answer = await bench.open("mock", "mock@other", stream=False)
    assert answer.attempt.replica == mock.base_url


async def test_a_page_of_html_is_no_stream(bench, mock, second):
    bench.pool("main", mock, attempts=1)
    bench.pool("other", second)
    answer = await bench.open("html", "mock@other")
    assert "HTML" in bench.observer.ended[0].error
    await answer.aclose()


async def test_an_answer_without_a_choice_is_none(bench, mock, second):
    bench.pool("main", mock, attempts=1)
    bench.pool("other", second)
    answer = await bench.open("no_choices", "mock@other", stream=False)
    assert answer.attempt.replica == second.base_url
