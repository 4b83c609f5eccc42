"""Real engines behind a real gateway: one computes long prompts, others answer. What fails changes no answer."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.settings import TelemetrySettings
from gateway.tracing import Tracing
from tests.engine.link import Link
from tests.engine.models import write_model
from tests.engine.serving import MODEL, Server
from tests.gateway.front_door import PRICE, eventually, front_door

pytestmark = pytest.mark.slow
SEED = "5e" * 32
PROMPT = [7 + i % 300 for i in range(200)]  # twelve full pages of sixteen, and eight tokens
FROM_TOKENS = 100


class Engines:
    """One prefilling engine behind a link, two that decode, and one that does everything itself."""

    def __init__(self, path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.link = Link(port)
        common = self.common = ("--kv-cache-bytes", str(8 << 20), "--max-model-len", "512")
        self.prefill_options = (*common, "--role", "prefill", "--kv-listen", f"tcp://127.0.0.1:{port}")
        self.prefill_options += ("--kv-address", self.link.address)
        self.path = path
        self.prefill = Server(path, *self.prefill_options)
        self.decode = [self.start_decode() for _ in range(2)]
        self.alone = Server(path, *common)
        for server in (self.prefill, *self.decode, self.alone):
            server.wait_ready()

    def expected(self, prompt, **body):
        body = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "cache_salt": "own", **body}
        return self.alone.complete(prompt, **body)["choices"][0]["token_ids"]

    def loaded(self):
        name = f'tierline_engine_kv_tier_pages_total{{model="{MODEL}",outcome="loaded",tier="{self.link.address}"}}'
        return [int(server.metric(name)) for server in self.decode]

    def start_decode(self):
        return Server(self.path, *self.common, "--role", "decode", "--kv-peer", self.link.address)

    def restore(self):
        """As at the beginning, whatever a test has done."""
        self.link.restore()
        if self.prefill.process.poll() is not None:
            self.prefill = Server(self.path, *self.prefill_options).wait_ready()
        self.decode = [d if d.process.poll() is None else self.start_decode().wait_ready() for d in self.decode]

    def close(self):
        for server in (self.prefill, *self.decode, self.alone):
            kill(server)
        self.link.close()


def kill(server):
    """The gateway sees it go; its descriptors are closed here."""
    server.http.close()
    server.process.kill()
    server.process.wait(30)
    server.process.stdout.close()


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_model(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIERLINE_PAGE_SEED", SEED)
        made = Engines(path)
        yield made
        made.close()


@pytest.fixture
def engines(started):
    started.restore()
    return started


def document(engines, **placement):
    roles = [(engines.prefill, "prefill"), *((engine, "decode") for engine in engines.decode)]
    return {
        "server": {"port": 0, "drain_seconds": 1},
        "models": {"tiny": {"tier": "small", "backend": "local", "upstream_model": MODEL, "price": PRICE}},
        "backends": {
            "local": {
                "replicas": [{"url": f"{engine.url}/v1", "role": role} for engine, role in roles],
                "placement": {"prefill_from_tokens": FROM_TOKENS, **placement},
            }
        },
        "cache": {"enabled": False},
    }


async def ask(door, prompt, **body):
    body = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "temperature": 0, **body}
    answer = await door.client.post(
        "/v1/completions", json={"model": "tiny", "prompt": prompt, **body}, headers=door.headers()
    )
    assert answer.status_code == 200, answer.text
    told = answer.json()
    usage = told["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    return told["choices"][0]["token_ids"], usage["prompt_tokens_details"]["cached_tokens"]


async def test_prompts_are_computed_by_one_engine_and_answered_by_another(engines, tmp_path):
    spans = InMemorySpanExporter()
    tracing = Tracing(TelemetrySettings(), span_processor=SimpleSpanProcessor(spans))
    async with front_door(tmp_path, document(engines), tracing=tracing) as door:
        prefilling = door.services.pools["local"].prefilling
        answer, cached = await ask(door, PROMPT)
        assert answer == engines.expected(PROMPT)
        assert cached == 0, "all of it was computed for this request"
        assert sum(engines.loaded()) == 12
        assert prefilling.legs == {"computed": 1}
        assert prefilling.tokens == len(PROMPT)

        turn = [*PROMPT, *answer, 11, 12, 13]
        assert (await ask(door, turn))[0] == engines.expected(turn)
        assert prefilling.legs == {"computed": 1}, "the replica that answered the first turn lacks only a few tokens"
        short = PROMPT[1:40]
        assert (await ask(door, short))[0] == engines.expected(short)
        seeded = [5, *PROMPT]
        await ask(door, seeded, seed=3, temperature=1)
        assert prefilling.legs == {"computed": 1}, "an answer that must be reproducible computes its prompt itself"

        rows = await door.rows()
        assert [row["input_tokens"] for row in rows] == [len(PROMPT), len(turn), len(short), len(seeded)]
        assert all(row["outcome"] == "success" for row in rows)
        decoding = {f"{engine.url}/v1" for engine in engines.decode}
        assert {row["replica"] for row in rows} <= decoding
        metrics = (await door.client.get("/metrics")).text
        assert 'tierline_prefills_total{backend="local",outcome="computed"} 1.0' in metrics

        # A stream, and a prompt that the prefilling engine knows: nothing of it is computed for this request.
        text = ""
        body = {
            "prompt": [[9, *PROMPT]],
            "max_tokens": 12,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
        }
        body |= {"stream": True, "model": "tiny"}
        async with door.client.stream("POST", "/v1/completions", json=body, headers=door.headers()) as streamed:
            async for line in streamed.aiter_lines():
                text += line
        assert text.endswith("data: [DONE]")
        assert prefilling.legs == {"computed": 2}
    named = {span.name: span for span in spans.get_finished_spans()}
    whole = next(span for span in spans.get_finished_spans() if span.context.span_id == named["prefill"].parent.span_id)
    assert named["prefill"].attributes["tierline.outcome"] == "computed"
    assert named["prefill"].attributes["tierline.replica"] == f"{engines.prefill.url}/v1"
    assert named["decode"].attributes["tierline.replica"] in decoding
    assert whole.start_time <= named["prefill"].start_time <= named["prefill"].end_time
    assert named["prefill"].end_time == pytest.approx(named["decode"].start_time, abs=1e6)


async def test_engines_say_what_their_role_does_not_do(engines):
    refused = engines.prefill.post("/v1/completions", prompt=PROMPT)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "wrong_role"
    assert "/v1/prefill" in refused.json()["error"]["message"]
    assert engines.decode[0].post("/v1/prefill/completions", prompt=PROMPT).json()["error"]["code"] == "wrong_role"
    told = engines.alone.post("/v1/prefill/completions", prompt=PROMPT).json()
    assert (told["object"], told["pages_at"]) == ("prefill", None)
    for header, value in (("x-tierline-prefilled-tokens", "-1"), ("x-tierline-prefilled-tokens", "many")):
        body = {"model": MODEL, "prompt": PROMPT}
        answer = engines.alone.http.post("/v1/completions", json=body, headers={header: value})
        assert answer.json()["error"]["code"] == "invalid_value"


async def test_a_prefilling_engine_that_dies_or_hangs_costs_time_and_no_answer(engines, tmp_path):
    async with front_door(tmp_path, document(engines, prefill_timeout_s=0.5)) as door:
        prefilling, loaded = door.services.pools["local"].prefilling, sum(engines.loaded())
        os.kill(engines.prefill.process.pid, signal.SIGSTOP)
        hung = [1, *PROMPT]
        assert (await ask(door, hung))[0] == engines.expected(hung)
        assert prefilling.legs == {"late": 1}
        dying = [2, *PROMPT]
        asked = asyncio.create_task(ask(door, dying))
        await eventually(lambda: prefilling.pool.replicas[0].outstanding == 1)
        os.kill(engines.prefill.process.pid, signal.SIGKILL)
        assert (await asked)[0] == engines.expected(dying)
        assert prefilling.legs == {"late": 1, "failed": 1}
        gone = [3, *PROMPT]
        assert (await ask(door, gone))[0] == engines.expected(gone)
        assert sum(engines.loaded()) == loaded
        assert [row["outcome"] for row in await door.rows()] == ["success"] * 3
        assert [replica.work for replica in door.services.pools["local"].replicas] == [0, 0]


async def test_a_transfer_that_is_cut_damaged_slow_or_stands_still_costs_time_and_no_answer(engines, tmp_path):
    link = engines.link
    async with front_door(tmp_path, document(engines)) as door:
        prefilling = door.services.pools["local"].prefilling

        async def asked_over_a_bad_link(number):
            prompt = [20 + number, *PROMPT]
            assert (await ask(door, prompt))[0] == engines.expected(prompt)
            assert prefilling.legs["computed"] == number

        link.change = lambda data: data[:-1] + bytes([data[-1] ^ 1])
        await asked_over_a_bad_link(1)
        link.change = lambda data: data
        link.cut_after = link.passed + 9000
        await asked_over_a_bad_link(2)
        link.cut_after = None
        link.allowed = link.passed + 9000
        await asked_over_a_bad_link(3)
        await asked_over_a_bad_link(4)


async def test_another_engine_goes_on_where_a_decoding_one_fails(engines, tmp_path):
    async with front_door(tmp_path, document(engines)) as door:
        pool = door.services.pools["local"]
        for number in range(4):  # some of these go to the dead one first, until it is known to be dead
            if number == 1:
                kill(engines.decode[0])
            prompt = [40 + number, *PROMPT]
            assert (await ask(door, prompt))[0] == engines.expected(prompt)
        assert pool.prefilling.legs["computed"] == 4, "one leg per request, however many attempts"
        rows = await door.rows()
        assert sum(row["outcome"] == "success" for row in rows) == 4
