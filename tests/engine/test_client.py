"""The asyncio side, with a real core process around a runner without a model: crashes, hangs, orphans, slow readers."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import psutil
import pytest

from engine.client import EngineClient, Generation
from engine.config import EngineConfig
from engine.metrics import EngineMetrics
from engine.text.answer import AnswerAborted, EngineBusy, EngineDown, GenerationFailed, PromptRejected
from engine.text.detokenizer import Detokenizer
from engine.types import FinishReason, SamplingParams
from tests.engine.fake_core import CRASH, FAIL_ROW, FAIL_STEP, HANG, SLOW
from tests.engine.fakes import expected_tokens


class Numbers:
    """Every token is its number and a comma."""

    special_ids = frozenset()

    def token_bytes(self, token_id):
        return b"%d," % token_id


def text_of(tokens):
    return "".join(f"{token}," for token in tokens)


def generation(prompt, max_tokens=6, group=None, **detokenizer):
    return Generation(
        list(prompt), SamplingParams(max_tokens=max_tokens), Detokenizer(Numbers(), **detokenizer), group=group
    )


@asynccontextmanager
async def running(model="fake", watchdog_seconds=60.0, **config):
    settings = EngineConfig(model_path=model, served_name="fake", **config)
    client = EngineClient(
        settings, EngineMetrics("fake"), core_module="tests.engine.fake_core", watchdog_seconds=watchdog_seconds
    )
    client.start()
    try:
        yield client
    finally:
        async with asyncio.timeout(20):
            await client.stop()


async def whole(answer):
    deltas = [delta async for delta in answer]
    return "".join(delta.text for delta in deltas), deltas[-1]


async def settled(client):
    """The metrics after everything sent so far has gone through the loop and its snapshot has come back."""
    for _ in range(2):
        assert (await client.health()).state == "ok"
    text = client.metrics.render().decode()
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name.replace('model="fake"', "").replace("{}", "").replace(",}", "}").replace("{,", "{"): float(value)
            for name, value in samples}  # fmt: skip


def pages(samples, state):
    return samples[f'tierline_engine_pages{{state="{state}"}}']


async def test_answers_arrive_as_text_with_counts_and_metrics():
    async with running() as client:
        ready = await client.wait_ready()
        assert ready.block_size == 4
        first, second = client.generate([generation([1, 2, 3]), generation([4, 5], 9)])
        (text, last), (other, _) = await asyncio.gather(whole(first), whole(second))
        assert text == text_of(expected_tokens([1, 2, 3], 6))
        assert other == text_of(expected_tokens([4, 5], 9))
        assert last.finish_reason is FinishReason.LENGTH
        assert (first.num_prompt_tokens, first.num_generated_tokens) == (3, 6)
        samples = await settled(client)
        assert samples["llm_ttft_seconds_count"] == 2
        assert samples["llm_tpot_seconds_count"] == 2
        assert samples['tierline_engine_tokens_total{kind="generated"}'] == 15
        assert samples['tierline_engine_requests_total{finish_reason="length"}'] == 2
        assert samples["llm_tokens_per_second"] > 0
        assert samples["llm_prefix_cache_hit_rate"] == 0
        assert samples["tierline_engine_up"] == 1
        assert pages(samples, "used") == 0
        assert pages(samples, "free") + pages(samples, "cached") == pages(samples, "total") == 256


async def test_the_pages_are_known_before_the_first_request():
    async with running() as client:
        await client.wait_ready()
        lines = client.metrics.render().decode().splitlines()
        counts = {state: f'tierline_engine_pages{{model="fake",state="{state}"}} ' for state in ("total", "free")}
        for line in counts.values():
            assert f"{line}256.0" in lines


async def test_the_second_identical_prompt_reports_cached_tokens():
    async with running() as client:
        await client.wait_ready()
        for cached in (0, 8):
            [answer] = client.generate([generation(range(1, 12))])
            await whole(answer)
            assert answer.cached_tokens == cached
        samples = await settled(client)
        assert samples["llm_prefix_cache_hit_rate"] == pytest.approx(8 / 22)


async def test_a_slow_reader_gets_one_merged_delta():
    async with running() as client:
        await client.wait_ready()
        [slow] = client.generate([generation([1, 2, 3], 50)])
        [other] = client.generate([generation([7], 60)])
        await whole(other)  # by now the slow one's answer is complete
        deltas = [delta async for delta in slow]
        assert len(deltas) == 1
        assert deltas[0].text == text_of(expected_tokens([1, 2, 3], 50))
        assert deltas[0].finish_reason is FinishReason.LENGTH


async def test_a_stop_string_ends_the_request_in_the_core_although_nobody_reads():
    async with running() as client:
        await client.wait_ready()
        tokens = expected_tokens([SLOW, 1], 10)
        stop = text_of(tokens)[-8:]
        [answer] = client.generate([generation([SLOW, 1], 900, stop=[stop])])
        async with asyncio.timeout(10):
            while answer.end_reason is None:
                await client.health()
        samples = await settled(client)
        assert samples["tierline_engine_running_requests"] == 0
        assert samples['tierline_engine_tokens_total{kind="generated"}'] < 30
        assert samples["tierline_engine_aborts_total"] == 0
        text, last = await whole(answer)
        assert text + stop == text_of(tokens[: answer.num_generated_tokens])
        assert last.stop == stop


async def test_abort_frees_the_pages_and_tells_the_reader():
    async with running() as client:
        await client.wait_ready()
        answers = client.generate([generation([SLOW, i], 900) for i in range(1, 5)])
        await anext(answers[0])
        client.abort(answers[:2])
        client.abort(answers[:2])
        with pytest.raises(AnswerAborted):
            await whole(answers[0])
        samples = await settled(client)
        assert samples["tierline_engine_running_requests"] == 2
        assert samples["tierline_engine_aborts_total"] == 2
        client.abort(answers)
        samples = await settled(client)
        assert pages(samples, "used") == 0
        assert samples['tierline_engine_requests_total{finish_reason="abort"}'] == 4


async def test_refusals_become_typed_errors():
    async with running(max_num_seqs=1, max_waiting=1) as client:
        await client.wait_ready()
        [answer] = client.generate([generation(range(1, 2000))])
        with pytest.raises(PromptRejected, match="1999 tokens"):
            await whole(answer)
        held = client.generate([generation([SLOW, 1], 900)])
        await anext(held[0])
        held += client.generate([generation([2])])
        busy = client.generate([generation([3])])
        with pytest.raises(EngineBusy) as caught:
            await whole(busy[0])
        assert caught.value.retry_after_seconds >= 1
        client.abort(held)
        assert (await settled(client))['tierline_engine_requests_total{finish_reason="rejected"}'] == 2


async def test_a_failing_row_or_step_fails_its_requests_with_the_reason():
    async with running() as client:
        await client.wait_ready()
        good, bad = client.generate([generation([1]), generation([FAIL_ROW])])
        with pytest.raises(GenerationFailed, match="the row fails as told"):
            await whole(bad)
        assert (await whole(good))[0] == text_of(expected_tokens([1], 6))
        [bad] = client.generate([generation([FAIL_STEP])])
        with pytest.raises(GenerationFailed, match="the step fails as told"):
            await whole(bad)
        assert (await settled(client))["tierline_engine_step_failures_total"] == 1


async def test_the_death_of_the_core_fails_what_is_pending_and_a_new_core_serves():
    async with running() as client:
        first = await client.wait_ready()
        answers = client.generate([generation([SLOW, i], 900) for i in range(3)])
        delta = await anext(answers[0])
        assert delta.text
        client.generate([generation([CRASH])])
        for answer in answers:
            with pytest.raises(EngineDown, match="exit code 3"):
                await whole(answer)
        assert (await client.health()).state != "ok"
        with pytest.raises(EngineDown, match="restarting"):
            client.generate([generation([1])])
        async with asyncio.timeout(30):
            second = await client.wait_ready()
        assert second.pid != first.pid
        [answer] = client.generate([generation([1])])
        assert (await whole(answer))[0] == text_of(expected_tokens([1], 6))
        samples = await settled(client)
        assert samples["tierline_engine_core_restarts_total"] == 1
        assert samples['tierline_engine_tokens_total{kind="generated"}'] > 6, "counters survive the restart"


async def test_a_core_that_is_killed_is_replaced():
    async with running() as client:
        ready = await client.wait_ready()
        [answer] = client.generate([generation([SLOW, 1], 900)])
        await anext(answer)
        os.kill(ready.pid, signal.SIGKILL)
        with pytest.raises(EngineDown, match="exit code -9"):
            await whole(answer)


async def test_a_core_that_hangs_reads_as_stalled_and_is_replaced():
    async with running(watchdog_seconds=0.5) as client:
        ready = await client.wait_ready()
        [answer] = client.generate([generation([HANG])])
        await client.health(timeout_seconds=0.1)  # may still be answered in the turn that takes the request in
        assert (await client.health(timeout_seconds=0.1)).state == "stalled"
        with pytest.raises(EngineDown, match="did not answer"):
            await whole(answer)
        async with asyncio.timeout(30):
            assert (await client.wait_ready()).pid != ready.pid


async def test_a_model_that_cannot_be_loaded_is_reported_once_and_not_tried_again():
    async with running("broken") as client:
        with pytest.raises(EngineDown, match="this model cannot be loaded"):
            await client.wait_ready()
        assert (await client.health()).state == "stopped"
        with pytest.raises(EngineDown):
            client.generate([generation([1])])


async def test_stop_ends_the_core():
    async with running() as client:
        ready = await client.wait_ready()
        [answer] = client.generate([generation([SLOW, 1], 900)])
        await anext(answer)
    with pytest.raises(EngineDown):
        await whole(answer)
    assert not psutil.pid_exists(ready.pid)


@pytest.mark.parametrize("prompt", [SLOW, HANG])
def test_no_orphan_when_the_parent_is_killed(prompt, tmp_path):
    """The parent is killed in the middle of a step, which for HANG would never end by itself."""
    script = f"""
import asyncio
from tests.engine.test_client import generation, running

async def main():
    async with running() as client:
        ready = await client.wait_ready()
        client.generate([generation([{prompt}, 1], 900)])
        print(ready.pid, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    core = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    started = time.monotonic()
    psutil.wait_procs([core], timeout=10)
    assert not core.is_running() or core.status() == psutil.STATUS_ZOMBIE
    assert time.monotonic() - started < 10
