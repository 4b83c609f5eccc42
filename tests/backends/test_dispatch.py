"""`Dispatcher.open` against real sockets: what is returned, refused, cut, and what the ledger sees."""

from __future__ import annotations

import asyncio
import time
import uuid

import msgspec
import pytest

from backends.dispatch import Call, Candidate, Event, NoBackend, StreamCut, UpstreamRefused
from tests.backends.reading import collect, drain

# Good answers.


async def test_plain_answer_is_returned_byte_for_byte(bench, mock):
    bench.pool("main", mock)
    answer = await bench.open(stream=False)
    assert answer.status == 200
    assert msgspec.json.decode(answer.whole.body)["x_unknown"] == {"kept": 0.7}
    assert answer.whole.completion.usage.completion_tokens == 34
    assert answer.attempt.outcome == "success"
    assert answer.attempt.status_code == 200
    with pytest.raises(TypeError, match="no events"):
        _ = answer.events
    await answer.aclose()


async def test_stream_is_relayed_event_by_event(bench, mock):
    bench.pool("main", mock)
    answer = await bench.open("mock,chunks=5,interval_ms=1")
    assert answer.attempt.outcome == "running"
    events = [event async for event in answer.events]
    await answer.aclose()
    assert len(events) == 1 + 5 + 1 + 1 + 1  # role, content, finish, usage, [DONE]
    assert all(event.raw == b"data: " + event.data + b"\n\n" for event in events)
    assert events[-1].done
    assert events[-1].chunk is None
    assert events[-2].chunk.usage.total_tokens == 46
    assert answer.attempt.outcome == "success"
    assert 0 < answer.attempt.first_content_s <= answer.attempt.duration_s


async def test_attempt_is_described(bench, mock):
    bench.pool("main", mock)
    before = time.time()
    answer = await bench.open(stream=False)
    attempt = answer.attempt
    assert uuid.UUID(attempt.id).version == 7
    assert attempt.number == 1
    assert attempt.replica == mock.base_url
    assert attempt.candidate.backend == "main"
    assert before <= attempt.started_at <= time.time()
    assert bench.observer.started == [attempt]
    assert bench.observer.ended == []  # a committed attempt is the caller's to end


async def test_request_is_sent_as_the_backend_needs_it(bench, mock):
    bench.pool("main", mock, api_key="secret", headers={"X-Team": "blue"})
    payload = {"temperature": 0.7, "x_unknown": [1, {"a": None}], "stream_options": {"include_obfuscation": False}}
    answer = await bench.open("up/stream", payload=payload, headers={"traceparent": "00-1"}, extra={"priority": 3})
    await drain(answer)
    record = mock.records[-1]
    sent = msgspec.json.decode(record.body)
    assert sent == {
        "model": "up/stream",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0.7,
        "x_unknown": [1, {"a": None}],
        "stream": True,
        "stream_options": {"include_obfuscation": False, "include_usage": True},
        "priority": 3,
    }
    assert record.path == "/v1/chat/completions"
    assert record.headers["authorization"] == "Bearer secret"
    assert record.headers["x-team"] == "blue"
    assert record.headers["x-request-id"] == "req-1"
    assert record.headers["traceparent"] == "00-1"
    assert record.headers["accept-encoding"] == "identity"


async def test_extra_fields_may_differ_per_candidate(bench, mock, second):
    bench.pool("main", mock, attempts=1)
    bench.pool("other", second)
    await bench.open("status", "mock@other", stream=False, extra=lambda candidate: {"salt": candidate.backend})
    assert msgspec.json.decode(mock.records[-1].body)["salt"] == "main"
    assert msgspec.json.decode(second.records[-1].body)["salt"] == "other"


async def test_no_credentials_are_sent_unless_configured(bench, mock):
    bench.pool("main", mock)
    await bench.open(stream=False)
    assert "authorization" not in mock.records[-1].headers


async def test_payload_is_not_changed(bench, mock):
    bench.pool("main", mock)
    payload = {"model": "public", "messages": [], "stream": True}
    call = Call(payload, "chat", False, "r")
    await bench.dispatcher.open(call, [Candidate("m", "small", "main", "up")], bench.observer)
    assert payload == {"model": "public", "messages": [], "stream": True}
    assert msgspec.json.decode(mock.records[-1].body)["stream"] is False


async def test_headers_that_http_does_not_allow_are_refused_before_anything_is_sent(bench, mock):
    bench.pool("main", mock)
    with pytest.raises(ValueError, match="line break"):
        await bench.open(headers={"x-a": "1\r\nx-b: 2"})
    assert mock.requests == 0
    assert bench.observer.started == []


async def test_wrong_candidates_are_named(bench, mock):
    bench.pool("main", mock)
    with pytest.raises(ValueError, match="has no pool"):
        await bench.open("mock@nowhere")
    with pytest.raises(ValueError, match="at least one"):
        await bench.dispatcher.open(Call({}, "chat", False, "r"), [], bench.observer)


async def test_split_characters_and_events_arrive_whole(bench, mock):
    bench.pool("main", mock)
    answer = await bench.open("mock,chunks=3,pad=7,piece=5")
    assert (await drain(answer)).count("äääx") == 3


# Refusals go back as they are.


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_a_refusal_is_returned_and_never_retried(bench, mock, second, status, stream):
    bench.pool("main", mock, attempts=3)
    bench.pool("other", second)
    with pytest.raises(UpstreamRefused) as caught:
        await bench.open(f"status,status={status}", "mock@other", stream=stream)
    assert caught.value.status == status
    assert msgspec.json.decode(caught.value.body)["error"]["code"] == status
    assert caught.value.credentials_fault == (status == 401)
    assert mock.requests == 1
    assert second.requests == 0
    assert bench.outcomes() == ["refused"]
    assert bench.observer.ended == [caught.value.attempt]
    assert bench.pools["main"].snapshot()[0].state == "healthy"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
async def test_a_refusal_inside_a_200_is_a_refusal(bench, mock, stream):
    bench.pool("main", mock, attempts=3)
    with pytest.raises(UpstreamRefused) as caught:
        await bench.open("error,code=400", stream=stream)
    assert caught.value.status == 400
    assert "upstream failed" in msgspec.json.decode(caught.value.body)["error"]["message"]
    assert mock.requests == 1


# Breaks after the first content are never a clean end.


@pytest.mark.parametrize(
    ("model", "kind", "outcome"),
    [
        ("cut,after=3", "disconnected", "cut"),
        ("end,after=3", "disconnected", "cut"),
        ("error,after=3", "upstream_error", "cut"),
        ("garbage,after=3", "protocol", "cut"),
        ("stall,after=3", "between_tokens_timeout", "timeout"),
        ("mock,chunks=1000,interval_ms=20", "total_timeout", "timeout"),
    ],
)
async def test_a_break_after_content_is_reported_after_what_came(bench, mock, model, kind, outcome):
    bench.pool("main", mock, between_tokens_s=0.2, total_s=0.5)
    answer = await bench.open(model)
    events: list[Event] = []
    with pytest.raises(StreamCut) as caught:
        await collect(answer, events)
    await answer.aclose()
    assert caught.value.kind == kind
    contents = [event for event in events if event.chunk.choices[0].delta.content]
    assert len(contents) == 3 or model.startswith("mock")
    assert answer.attempt.outcome == outcome
    assert kind in answer.attempt.error
    assert bench.observer.ended == []
    assert bench.pools["main"].snapshot()[0].failures_total == 1


async def test_the_calls_own_deadline_cuts_a_stream(bench, mock):
    bench.pool("main", mock)
    answer = await bench.open("mock,chunks=1000,interval_ms=20", deadline=time.monotonic() + 0.3)
    with pytest.raises(StreamCut) as caught:
        await drain(answer)
    assert caught.value.kind == "deadline"
    assert bench.pools["main"].snapshot()[0].failures_total == 0  # the caller's time was short, not the server slow


async def test_a_deadline_that_has_passed_sends_nothing(bench, mock):
    bench.pool("main", mock)
    with pytest.raises(NoBackend) as caught:
        await bench.open(deadline=time.monotonic() - 1)
    assert (caught.value.kind, caught.value.status) == ("deadline", 504)
    assert str(caught.value) == "The request's deadline had passed before a server could be asked."
    assert mock.requests == 0


async def test_many_at_once(bench, mock, second):
    bench.pool("main", mock, second)

    async def one(number: int) -> str:
        answer = await bench.open(f"mock,chunks={number % 7 + 1},interval_ms=1")
        return await drain(answer)

    texts = await asyncio.gather(*(one(number) for number in range(64)))
    assert [text.count("t=") for text in texts] == [number % 7 + 1 for number in range(64)]
    assert min(mock.requests, second.requests) > 16
