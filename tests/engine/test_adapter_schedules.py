"""Adapters in whatever schedule: the answers are PEFT's, whoever shares the step, the pages or the drafts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from engine.adapters.peft import find_folder
from engine.adapters.targets import adapter_values
from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import PrefixCache
from engine.limits import NeverFits, SchedulerConfig
from engine.load_runner import load_runner
from engine.loader import open_model
from engine.messages import NewRequest
from engine.runner import ModelRunner
from engine.scheduling.scheduler import Scheduler
from engine.spec.draft_model import DraftModel
from engine.spec.ngram import NgramProposer
from engine.spec.speculator import Speculator
from engine.types import BeamParams, FinishReason, SamplingParams, StepPlan
from tests.engine.adapters import write_adapter
from tests.engine.models import row, write_model

A, B, AGAIN = 1, 2, 3  # AGAIN has the content of A
PHRASE = [17, 93, 45, 201, 88, 139]
PROMPTS = [[5, *PHRASE, 77, *PHRASE[:3]], [6, 7, 8], PHRASE * 6, [301, 9] * 10]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("schedules")


@pytest.fixture(scope="module")
def references(folder) -> dict[int, Any]:
    """transformers' model and PEFT's, by adapter; their files are in the folder."""
    base = write_model(folder / "float.gguf")
    write_model(folder / "small.gguf", seed=1)
    models = {0: base, A: write_adapter(folder / "a", base, seed=1)}
    models[B] = write_adapter(folder / "b", base, seed=2, r=7, target_modules=["q_proj", "k_proj", "down_proj"])
    models[AGAIN] = models[A]
    return models


def load(path: Path, adapters: dict[int, Path], precision: str = "float32") -> ModelRunner:
    model = open_model(path)
    values = 4 * adapter_values(model.spec, 16)
    runner = load_runner(
        model, precision=precision, max_model_len=160, kv_cache_bytes=4 << 20, device="cpu", adapter_values=values
    )
    for number, place in adapters.items():
        runner.adapters.loaded[number] = runner.load_adapter(find_folder(str(place), None), most_rank=16)
    runner.attention.kv_cache.fill_(torch.nan)
    return runner


@pytest.fixture(scope="module")
def runner(folder, references) -> ModelRunner:
    return load(folder / "float.gguf", {A: folder / "a", B: folder / "b", AGAIN: folder / "a"})


@pytest.fixture(scope="module")
def packed(folder, references) -> ModelRunner:
    write_model(folder / "packed.gguf", encoding=GGMLQuantizationType.Q4_1)
    return load(folder / "packed.gguf", {A: folder / "a", B: folder / "b"}, "auto")


def make_scheduler(runner, *, num_blocks=80, budget=64, speculator=None) -> Scheduler:
    cache = PrefixCache(BlockPool(num_blocks), 16, model_digest=b"", kv_dtype="float32")
    config = SchedulerConfig(8, budget, max_model_len=runner.max_model_len)
    loaded = runner.adapters.loaded
    return Scheduler(config, cache, eos_token_ids=frozenset({1}), speculator=speculator, adapters=loaded)


def request(number, prompt, adapter, params=GREEDY, **fields) -> NewRequest:
    return NewRequest(number, prompt, params, adapter=adapter, **fields)


def run(scheduler, runner, requests) -> dict[int, dict[str, Any]]:
    """What each request yielded, by id."""
    scheduler.add(requests)
    found = {r.request_id: {"tokens": [], "logprobs": [], "cached": None} for r in requests}
    while scheduler.has_work:
        plan = scheduler.schedule()
        for output in scheduler.update(plan, runner.execute(plan)):
            assert output.finish_reason is not FinishReason.ERROR, output.error
            one = found[output.request_id]
            one["tokens"] += output.token_ids
            one["logprobs"] += [entry.logprob for entry in output.logprobs or ()]
            one["cached"] = output.cached_tokens if output.cached_tokens is not None else one["cached"]
        scheduler.check()
    return found


@torch.inference_mode()
def greedy(model, prompt, count=12) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


MIXED = [(prompt, adapter) for prompt in PROMPTS for adapter in (0, A, B)]


@pytest.mark.parametrize("budget", [64, 9])
def test_base_and_adapters_in_one_batch_answer_as_peft_does(references, runner, budget):
    requests = [request(i, prompt, adapter) for i, (prompt, adapter) in enumerate(MIXED)]
    found = run(make_scheduler(runner, budget=budget), runner, requests)
    answers = [found[i]["tokens"] for i in range(len(MIXED))]
    assert answers == [greedy(references[adapter], prompt) for prompt, adapter in MIXED]
    assert len({tuple(answer) for answer in answers[:3]}) == 3  # the adapters do something


def test_on_packed_weights_a_mixed_batch_has_the_bits_of_each_alone(packed):
    requests = [request(i, prompt, adapter) for i, (prompt, adapter) in enumerate(MIXED)]
    together = run(make_scheduler(packed), packed, requests)
    for one in requests:
        alone = run(make_scheduler(packed), packed, [one])[one.request_id]
        assert together[one.request_id] == alone


def test_on_packed_weights_logits_are_near_those_of_the_decoded_ones(folder, packed):
    """The base product is rounded as it is without adapters; the adapters' share is not."""
    decoded = load(folder / "packed.gguf", {A: folder / "a"})
    for prompt in PROMPTS:
        values = []
        for one in (packed, decoded):
            plan = StepPlan([dataclasses.replace(row(prompt, [1, 2, 3], params=GREEDY), adapter=A)])
            (result,) = one.execute(plan)
            values.append(result.logprobs[0])
        assert values[0].token_id == values[1].token_id
        assert abs(values[0].logprob - values[1].logprob) < 2e-3


def test_pages_are_shared_by_content_and_never_across_adapters(references, runner):
    scheduler, prompt = make_scheduler(runner), [(7 * i) % 300 for i in range(50)]
    for number, (adapter, cached) in enumerate([(A, 0), (B, 0), (0, 0), (A, 48), (AGAIN, 48), (B, 48), (0, 48)]):
        found = run(scheduler, runner, [request(number, prompt, adapter)])[number]
        assert found["cached"] == cached, adapter
        assert found["tokens"] == greedy(references[adapter], prompt)


def test_another_adapter_under_the_same_number_hits_nothing_old(folder, references, runner, tmp_path):
    """A name that is loaded anew gets another number; even the same one could not mix pages up."""
    scheduler, prompt = make_scheduler(runner), [(7 * i) % 300 for i in range(50)]
    first = run(scheduler, runner, [request(0, prompt, A)])[0]
    other = write_adapter(tmp_path, references[0], seed=8)
    kept = runner.adapters.loaded[A]
    runner.adapters.loaded[A] = runner.load_adapter(tmp_path, most_rank=16)
    try:
        second = run(scheduler, runner, [request(1, prompt, A)])[1]
    finally:
        runner.adapters.loaded[A] = kept
    assert second["cached"] == 0
    assert second["tokens"] == greedy(other, prompt) != first["tokens"]


def test_a_salt_and_an_adapter_are_two_things(runner):
    scheduler, prompt = make_scheduler(runner), [(7 * i) % 300 for i in range(50)]
    digest = runner.adapters.loaded[A].digest
    roots = {scheduler.cache.root(salt, adapter) for salt in (None, "", digest.hex()) for adapter in (b"", digest)}
    assert len(roots) == 6
    run(scheduler, runner, [request(0, prompt, A, cache_salt="team")])
    assert run(scheduler, runner, [request(1, prompt, A)])[1]["cached"] == 0
    assert run(scheduler, runner, [request(2, prompt, 0, cache_salt="team")])[2]["cached"] == 0
    assert run(scheduler, runner, [request(3, prompt, A, cache_salt="team")])[3]["cached"] == 48


def test_preempted_requests_go_on_with_their_adapters(references, runner):
    scheduler = make_scheduler(runner, num_blocks=9)
    mixed = [([i + 2, *PHRASE * 4], (0, A, B)[i % 3]) for i in range(6)]
    params = dataclasses.replace(GREEDY, max_tokens=30)
    requests = [request(i, prompt, adapter, params) for i, (prompt, adapter) in enumerate(mixed)]
    found = run(scheduler, runner, requests)
    assert scheduler.stats.preemptions > 0
    for i, (prompt, adapter) in enumerate(mixed):
        assert found[i]["tokens"] == greedy(references[adapter], prompt, 30)


@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_drafts_without_an_adapter_are_checked_with_it(folder, references, runner, kind):
    if kind == "draft":
        small = load(folder / "small.gguf", {})
        small.sampler = runner.sampler
        proposer: Any = DraftModel(small, max_num_batched_tokens=512)
    else:
        proposer = NgramProposer()
    speculator = Speculator(proposer, 3)
    params = dataclasses.replace(GREEDY, max_tokens=24)
    requests = [request(i, prompt, adapter, params) for i, (prompt, adapter) in enumerate(MIXED)]
    found = run(make_scheduler(runner, speculator=speculator), runner, requests)
    assert speculator.stats.drafted_tokens > 0
    for i, (prompt, adapter) in enumerate(MIXED):
        assert found[i]["tokens"] == greedy(references[adapter], prompt, 24)


def test_siblings_share_the_prompt_of_their_adapter(runner):
    params = [dataclasses.replace(GREEDY, temperature=1.0, seed=seed) for seed in (3, 4, 5)]
    together = [request(i, PROMPTS[2], A, one, group=0) for i, one in enumerate(params)]
    found = run(make_scheduler(runner), runner, together)
    for i, one in enumerate(params):
        alone = run(make_scheduler(runner), runner, [request(i, PROMPTS[2], A, one)])[i]
        assert found[i]["tokens"] == alone["tokens"]


@torch.inference_mode()
def test_beams_are_those_of_transformers_with_the_adapter(references, runner):
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, beam=BeamParams(3))
    found = run(make_scheduler(runner), runner, [request(0, PROMPTS[0], A, params)])[0]
    answer = references[A].generate(
        input_ids=torch.tensor([PROMPTS[0]]), num_beams=3, max_new_tokens=8, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    assert found["tokens"] == answer[0, len(PROMPTS[0]) :].tolist()


def test_an_adapter_that_is_not_there_is_refused(runner):
    with pytest.raises(NeverFits, match="not loaded any more"):
        make_scheduler(runner).add([request(0, [5, 6], 99)])
    rows = [
        dataclasses.replace(row([5, 6, 7], [page], request_id=page), adapter=(0, A, 99)[page - 1]) for page in (1, 2, 3)
    ]
    results = runner.execute(StepPlan(rows))
    assert [result.error for result in results] == [None, None, "adapter 99 is not loaded"]


def test_memory_is_kept_for_adapters(folder, runner):
    plain = load_runner(folder / "float.gguf", precision="float32", max_model_len=160, kv_cache_bytes=4 << 20)
    kept = 4 * 4 * adapter_values(runner.spec, 16)
    assert runner.ledger().adapter_bytes == kept
    assert runner.ledger().total_bytes - plain.ledger().total_bytes == kept
    assert json.loads(json.dumps(runner.describe()))["memory"]["adapter_bytes"] == kept
    loaded = runner.adapters.loaded
    assert loaded[A].num_bytes == 4 * adapter_values(runner.spec, 4)
    assert sum(one.num_bytes for one in loaded.values()) <= kept
