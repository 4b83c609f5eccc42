"""Other weights while the engine serves: what runs ends on the old ones, what waits runs on the new ones."""

import asyncio
import os
import signal

import gguf
import numpy as np
import pytest

from engine.exchange import ReloadFailed
from engine.text.answer import AnswerAborted, EngineBusy, EngineDown
from tests.engine.fake_core import SLOW
from tests.engine.fakes import expected_tokens
from tests.engine.models import write_model
from tests.engine.serving import Server
from tests.engine.test_client import generation, pages, running, settled, text_of, whole

ONE_ROW = {"max_num_seqs": 1, "max_waiting": 3}
PROMPT = list(range(1, 12))


def digest(path):
    return path.encode().hex()


async def test_what_runs_ends_on_the_old_weights_and_what_waits_runs_on_the_new_ones():
    async with running(**ONE_ROW) as client:
        old = await client.wait_ready()
        [warm] = client.generate([generation(PROMPT)])
        await whole(warm)  # the old core has its pages from now on
        # For more than a second, within which the order must reach the old core, however busy the machine.
        [slow] = client.generate([generation([SLOW, 1], 300)])
        await anext(slow)
        [queued] = client.generate([generation(PROMPT)])
        reload = asyncio.create_task(client.reload("newer"))
        await asyncio.sleep(0)
        [late] = client.generate([generation([7, 8])])
        text, last = await whole(slow)
        assert (await whole(queued))[0] == text_of(expected_tokens(PROMPT, 6))
        assert (await whole(late))[0] == text_of(expected_tokens([7, 8], 6))
        new = await reload
        assert last.finish_reason == "length"
        assert text.endswith(text_of(expected_tokens([SLOW, 1], 300)[-5:]))
        assert (old.model_digest, new.model_digest) == (digest("fake"), digest("newer"))
        assert new.pid != old.pid
        assert new.page_space != old.page_space, "no page of the old weights can be taken for one of the new"
        assert queued.cached_tokens == 0, "it ran where its prompt had never been"
        samples = await settled(client)
        assert samples['tierline_engine_weight_reloads_total{outcome="loaded"}'] == 1
        assert samples["tierline_engine_core_restarts_total"] == 0
        assert pages(samples, "used") == 0


async def test_weights_that_do_not_load_leave_the_old_ones_and_lose_no_request():
    async with running(**ONE_ROW) as client:
        old = await client.wait_ready()
        [slow] = client.generate([generation([SLOW, 1], 40)])
        await anext(slow)
        [queued] = client.generate([generation(PROMPT)])
        with pytest.raises(ReloadFailed, match="this model cannot be loaded"):
            await client.reload("broken")
        assert (await whole(queued))[0] == text_of(expected_tokens(PROMPT, 6))
        assert (await whole(slow))[1].finish_reason == "length"
        assert client.ready.model_digest == old.model_digest
        assert (await client.health()).state == "ok"
        samples = await settled(client)
        assert samples['tierline_engine_weight_reloads_total{outcome="failed"}'] == 1
        assert (await client.reload("newer")).model_digest == digest("newer"), "and another try may succeed"


async def test_one_exchange_at_a_time_and_a_bounded_number_that_waits_for_it():
    async with running(**ONE_ROW) as client:
        await client.wait_ready()
        [slow] = client.generate([generation([SLOW, 1], 60)])
        await anext(slow)
        reload = asyncio.create_task(client.reload("newer"))
        await asyncio.sleep(0)
        with pytest.raises(ReloadFailed, match="already"):
            await client.reload("other")
        held = client.generate([generation([i]) for i in range(1, 5)])
        [refused] = client.generate([generation([9])])
        with pytest.raises(EngineBusy, match="4 requests wait for it"):
            await whole(refused)
        client.abort(held[:1])
        with pytest.raises(AnswerAborted):
            await whole(held[0])
        for i, answer in enumerate(held[1:], 2):
            assert (await whole(answer))[0] == text_of(expected_tokens([i], 6))
        assert (await reload).model_digest == digest("newer")


async def test_a_core_that_is_lost_meanwhile_costs_its_own_answers_only():
    async with running(**ONE_ROW) as client:
        ready = await client.wait_ready()
        [doomed] = client.generate([generation([SLOW, 1], 900)])
        await anext(doomed)
        reload = asyncio.create_task(client.reload("newer"))
        await asyncio.sleep(0)
        [late] = client.generate([generation([7])])
        os.kill(ready.pid, signal.SIGKILL)
        with pytest.raises(EngineDown, match="exit code -9"):
            await whole(doomed)
        assert (await whole(late))[0] == text_of(expected_tokens([7], 6))
        assert (await reload).model_digest == digest("newer")


async def test_stopping_in_the_middle_ends_what_was_held():
    async with running(**ONE_ROW) as client:
        await client.wait_ready()
        [slow] = client.generate([generation([SLOW, 1], 900)])
        await anext(slow)
        reload = asyncio.create_task(client.reload("newer"))
        await asyncio.sleep(0)
        [held] = client.generate([generation([7])])
    for lost in (reload, whole(held), whole(slow)):
        with pytest.raises(EngineDown):
            await lost


async def test_answers_to_one_prompt_stay_together():
    async with running(max_num_seqs=2, max_waiting=4) as client:
        await client.wait_ready()
        pair = client.generate([generation([SLOW, 5], 30, group=1) for _ in range(3)])  # two run, one waits
        await anext(pair[0])
        reload = asyncio.create_task(client.reload("newer"))
        for answer in pair:
            assert (await whole(answer))[1].finish_reason == "length"
        assert (await reload).model_digest == digest("newer")


# --- over HTTP ---------------------------------------------------------------------------------------------------


def test_a_server_exchanges_its_weights_by_a_guarded_route(tmp_path):
    store = tmp_path / "weights"
    store.mkdir()
    for seed in (0, 1):
        write_model(store / f"{seed}.gguf", seed=seed)
    write_model(store / "larger.gguf", sizes={"vocab_size": 400})
    (store / "torn.gguf").write_bytes((store / "1.gguf").read_bytes()[:50_000])
    write_model(store / "spoilt.gguf", seed=2)
    spoilt = gguf.GGUFReader(store / "spoilt.gguf", "r+")
    next(tensor for tensor in spoilt.tensors if tensor.name == "blk.0.attn_v.weight").data[:] = np.nan
    spoilt.data.flush()
    write_model(tmp_path / "outside.gguf", seed=1)
    (store / "link.gguf").symlink_to(tmp_path / "outside.gguf")
    (store / "pipes").mkdir()
    os.mkfifo(store / "pipe.gguf")
    os.mkfifo(store / "pipes" / "config.json")
    options = ("--max-model-len", "256", "--kv-cache-bytes", str(10 << 20))
    server = Server(store / "0.gguf", *options, "--reload-dir", str(store)).wait_ready()
    try:
        first = server.complete("x", max_tokens=8)["choices"][0]["text"]
        before = server.http.get("/v1/models").json()["data"][0]["digest"]
        for path, problem in (
            ("larger.gguf", "another tokenizer"),
            ("torn.gguf", "torn.gguf"),
            ("spoilt.gguf", "not finite"),
            ("none.gguf", "no such file"),
            ("../outside.gguf", "lies outside"),
            ("link.gguf", "lies outside"),
            ("a\0b", "no such file"),
            ("pipe.gguf", "a pipe"),
            ("pipes", "a pipe"),
        ):
            refused = server.http.post("/v1/reload_weights", json={"path": path})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "reload_failed"), path
            assert problem in refused.json()["error"]["message"]
        assert server.complete("x", max_tokens=8)["choices"][0]["text"] == first
        done = server.http.post("/v1/reload_weights", json={"path": "1.gguf"})
        assert done.status_code == 200, done.text
        assert done.json()["digest"] == server.http.get("/v1/models").json()["data"][0]["digest"] != before
        assert server.complete("x", max_tokens=8)["choices"][0]["text"] != first
        assert server.http.get("/health").status_code == 200
    finally:
        assert server.stop() == 0


def test_without_a_folder_to_load_from_the_route_is_off(server):
    refused = server.http.post("/v1/reload_weights", json={"path": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "reload_disabled")
