"""The life of a response against clients that misbehave: real client and core (without a model), ASGI by hand."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from engine.server.errors import ApiError
from engine.server.respond import Job, respond
from tests.engine.fake_core import CRASH, FAIL_ROW, SLOW
from tests.engine.fakes import expected_tokens
from tests.engine.test_client import generation, running, settled, text_of


class TextDialect:
    """The least that a dialect can be."""

    id_prefix = "t-"
    object_name = chunk_object_name = "text"
    prompt_field = "prompt"

    def extra_fields(self):
        return {}

    def take_prompt(self, number, entries):
        pass

    def first(self, index):
        return None

    def middle(self, index, delta):
        return [{"index": index, "text": delta.text}] if delta.text else []

    def reasoning_tokens(self):
        return None

    def last(self, index, delta):
        return {"index": index, "finish_reason": delta.finish_reason}

    def whole(self, index, delta):
        return {"index": index, "text": delta.text, "finish_reason": delta.finish_reason}


def job(*generations, stream=True):
    return Job("fake", "request-1", generations, 1, TextDialect(), stream, include_usage=True, best_of=1)


class Peer:
    """The client's end: `receive` waits for `leave`, `send` keeps everything, and may be held."""

    def __init__(self):
        self.sent = []
        self.left = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)
        await self.reads.wait()

    @property
    def events(self):
        bodies = [m["body"] for m in self.sent if m["type"] == "http.response.body"]
        return [body.decode().removeprefix("data: ").strip() for body in bodies]


@asynccontextmanager
async def engine():
    async with running() as client:
        await client.wait_ready()
        yield client


async def test_every_event_is_one_write_and_usage_comes_before_done():
    async with engine() as client:
        peer = Peer()
        await respond(client, job(generation([1, 2], 4)), peer.receive, peer.send)
        assert peer.sent[0]["status"] == 200
        *chunks, usage, done = peer.events
        assert done == "[DONE]"
        assert json.loads(usage)["usage"]["completion_tokens"] == 4
        choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
        assert "".join(choice.get("text", "") for choice in choices) == text_of(expected_tokens([1, 2], 4))
        assert [choice.get("finish_reason") for choice in choices] == [None] * (len(choices) - 1) + ["length"]


async def test_a_client_that_reads_slowly_gets_few_large_events_and_the_whole_text():
    async with engine() as client:
        peer = Peer()
        peer.reads.clear()
        task = asyncio.create_task(respond(client, job(generation([SLOW, 1], 60)), peer.receive, peer.send))
        while (await settled(client))["tierline_engine_running_requests"] or not peer.sent:
            pass  # generation goes on to its end while the first write is blocked
        peer.reads.set()
        await task
        texts = [json.loads(event)["choices"][0].get("text", "") for event in peer.events[:-2]]
        assert "".join(texts) == text_of(expected_tokens([SLOW, 1], 60))
        assert len(texts) <= 4


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_client_that_does_not_read_at_all_is_given_up_when_the_edge_does(choices):
    """Its patience is tested in tests/edge: then the disconnect is told, and what is being written returns."""
    async with engine() as client:
        peer = Peer()
        peer.reads.clear()
        answers = [generation([SLOW, number], 900) for number in range(choices)]
        task = asyncio.create_task(respond(client, job(*answers), peer.receive, peer.send))
        while (await settled(client))["tierline_engine_running_requests"] < choices or not peer.sent:
            pass
        peer.left.set()
        while (await settled(client))["tierline_engine_running_requests"]:
            pass  # its pages are free though a write still waits
        assert not task.done()
        peer.reads.set()
        await task
        assert (await settled(client))["tierline_engine_aborts_total"] == choices
        assert all('"finish_reason"' not in event and event != "[DONE]" for event in peer.events)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_all_its_answers(stream):
    async with engine() as client:
        peer = Peer()
        both = job(generation([SLOW, 1], 900), generation([SLOW, 2], 900), stream=stream)
        task = asyncio.create_task(respond(client, both, peer.receive, peer.send))
        while (await settled(client))["tierline_engine_running_requests"] < 2:
            pass
        peer.left.set()
        await task
        samples = await settled(client)
        assert samples["tierline_engine_aborts_total"] == 2
        assert samples["tierline_engine_running_requests"] == 0
        assert "[DONE]" not in peer.events


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_before_the_first_token_is_a_status(stream):
    async with engine() as client:
        peer = Peer()
        with pytest.raises(ApiError, match="the row fails as told") as caught:
            await respond(client, job(generation([FAIL_ROW]), stream=stream), peer.receive, peer.send)
        assert caught.value.status == 500
        assert peer.sent == []


async def test_a_failure_of_one_answer_ends_its_siblings_and_the_stream_with_an_error_event():
    async with engine() as client:
        peer = Peer()
        # The second answer starts later than the first, since it needs many steps to read its prompt.
        late = generation([FAIL_ROW] + [SLOW] * 900)
        await respond(client, job(generation([SLOW, 1], 900), late), peer.receive, peer.send)
        assert json.loads(peer.events[-1])["error"]["code"] == "generation_failed"
        assert peer.sent[-1]["more_body"] is False
        assert (await settled(client))["tierline_engine_running_requests"] == 0


async def test_the_death_of_the_core_ends_a_stream_with_an_error_event():
    async with engine() as client:
        peer = Peer()
        task = asyncio.create_task(respond(client, job(generation([SLOW, 1], 900)), peer.receive, peer.send))
        while not peer.events:
            await client.health()
        client.generate([generation([CRASH])])
        await task
        assert json.loads(peer.events[-1])["error"]["code"] == "engine_unavailable"
