"""Vectors and scores of texts: the numbers of transformers, whatever the steps that they were computed in."""

import json

import numpy as np
import pytest
import torch
import transformers

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import PrefixCache
from engine.limits import NeverFits, SchedulerConfig
from engine.load_runner import load_runner
from engine.loader import ModelFileError, open_model
from engine.messages import NewRequest
from engine.models.pooling import PoolingKind, PoolingSpec, Task, choose_task
from engine.scheduling.scheduler import Scheduler
from engine.types import SamplingParams
from tests.engine.byte_tokenizer import write_byte_tokenizer
from tests.engine.hf_models import random_model
from tests.engine.models import write_model
from tests.engine.pooling_models import TEXTS, reference_vector, write_embedder, write_reranker

PAGE = 16


def compute(path, texts, *, spec=None, chunk=64, pages=24, rounds=1, preempt=False):
    """The vectors of the texts, all asked for at once, by the real runner and scheduler; and the scheduler.

    `preempt`: after each step, the youngest that runs gives up its pages.
    """
    model = open_model(path)
    spec = spec or choose_task("auto", model.info.pooling)
    runner = load_runner(
        model, precision="float32", device="cpu", kv_cache_bytes=1 << 21, max_num_batched_tokens=chunk, pooling=spec
    )
    cache = PrefixCache(BlockPool(pages + 1), runner.geometry.block_size, model_digest=b"m", kv_dtype="float32")
    config = SchedulerConfig(max_num_seqs=min(4, chunk), max_num_batched_tokens=chunk, max_model_len=1024)
    scheduler = Scheduler(config, cache, eos_token_ids=frozenset(), pooling=spec)
    found = {}
    for number in range(rounds):
        scheduler.add([NewRequest(number * 100 + i, list(text), SamplingParams()) for i, text in enumerate(texts)])
        while scheduler.has_work:
            plan = scheduler.schedule()
            assert not any(row.sample for row in plan.rows)
            for output in scheduler.update(plan, runner.execute(plan)):
                assert output.error is None, output.error
                found[output.request_id] = np.frombuffer(output.vector, dtype="<f4")
            if preempt and scheduler._running:
                scheduler._preempt(scheduler._running[-1])
            scheduler.check()
    assert cache.pool.num_used == 0
    return [found[key] for key in sorted(found)], scheduler


@pytest.mark.parametrize("kind", ["lasttoken", "mean_tokens", "cls_token"])
@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_vectors_are_those_of_transformers_in_steps_of_any_size(tmp_path, kind, chunk):
    model = write_embedder(tmp_path, kind)
    found, _ = compute(tmp_path, TEXTS, chunk=chunk)
    for text, vector in zip(TEXTS, found, strict=True):
        assert np.allclose(vector, reference_vector(model, text, kind), atol=2e-5)


@pytest.mark.parametrize("kind", ["lasttoken", "mean_tokens"])
@pytest.mark.parametrize("preempt", [False, True])
def test_the_prefix_cache_and_preemptions_change_no_vector(tmp_path, kind, preempt):
    model = write_embedder(tmp_path, kind)
    common = list(range(1, 41))
    texts = [[*common, 50 + i, *range(60, 90)] for i in range(4)]
    found, scheduler = compute(tmp_path, texts, chunk=16, pages=9, rounds=2, preempt=preempt)
    for text, vector in zip(texts * 2, found, strict=True):
        assert np.allclose(vector, reference_vector(model, text, kind), atol=2e-5)
    assert bool(scheduler.stats.preemptions) == preempt
    hits = scheduler.cache.stats.hit_tokens
    assert hits > 0 if kind == "lasttoken" else hits == 0, "a mean needs every token's state"


def test_scores_are_those_of_transformers(tmp_path):
    model = write_reranker(tmp_path)
    found, _ = compute(tmp_path, TEXTS, chunk=32)
    with torch.no_grad():
        expected = [model(torch.tensor([text])).logits[0].numpy() for text in TEXTS]
    assert all(np.allclose(a, b, atol=2e-5) for a, b in zip(found, expected, strict=True))
    assert open_model(tmp_path).info.pooling == PoolingSpec(normalise=False, labels=1)


@pytest.mark.parametrize(("number", "kind"), [(1, "mean_tokens"), (3, "lasttoken")])
def test_gguf_files_say_how_they_pool(tmp_path, number, kind):
    path = tmp_path / "tiny.gguf"
    model = write_model(path, metadata={"llama.pooling_type": number})
    (vector,), _ = compute(path, [TEXTS[2]])
    assert np.allclose(vector, reference_vector(model.model, TEXTS[2], kind), atol=2e-5)


def test_what_a_folder_says_decides_what_it_is_for(tmp_path):
    write_embedder(tmp_path, "mean_tokens", normalise=False)
    assert open_model(tmp_path).info.pooling == PoolingSpec(PoolingKind.MEAN, normalise=False)
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')  # the newer form
    assert open_model(tmp_path).info.pooling == PoolingSpec(PoolingKind.LAST, normalise=False)
    (tmp_path / "modules.json").unlink()  # blocks without an output matrix are of no other use
    assert open_model(tmp_path).info.pooling == PoolingSpec()


@pytest.mark.parametrize(
    ("modules", "pooling", "problem"),
    [
        ("{", "{}", "damaged"),
        (["Transformer", "Pooling", "Dense"], "{}", "Transformer → Pooling → Dense is not supported"),
        (["Transformer", "Pooling"], '{"pooling_mode_max_tokens": true}', "pooling by pooling_mode_max_tokens"),
        (["Transformer", "Pooling"], '{"pooling_mode": "weightedmean"}', "pooling by weightedmean"),
        (["Transformer", "Pooling"], "{}", "pooling by nothing"),
        (
            ["Transformer", "Pooling"],
            '{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true}',
            "pooling by pooling_mode_mean_tokens and pooling_mode_cls_token",
        ),
    ],
)
def test_other_kinds_of_pooling_are_refused_by_name(tmp_path, modules, pooling, problem):
    write_embedder(tmp_path, "lasttoken")
    if isinstance(modules, list):
        named = [{"type": f"sentence_transformers.models.{name}", "path": "1_Pooling"} for name in modules]
        modules = json.dumps(named)
    (tmp_path / "modules.json").write_text(modules)
    (tmp_path / "1_Pooling" / "config.json").write_text(pooling)
    with pytest.raises(ModelFileError, match=problem):
        _ = open_model(tmp_path).info


def test_a_path_out_of_the_folder_is_refused(tmp_path):
    write_embedder(tmp_path / "model", "lasttoken")
    chain = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "../elsewhere"}]
    (tmp_path / "model" / "modules.json").write_text(json.dumps(chain))
    with pytest.raises(ModelFileError, match="lies outside the folder"):
        _ = open_model(tmp_path / "model").info


def test_a_classifier_of_several_labels_is_refused(tmp_path):
    write_reranker(tmp_path, num_labels=3)
    with pytest.raises(ModelFileError, match="a classifier with 3 labels"):
        _ = open_model(tmp_path).info


def test_the_task_that_is_asked_for_must_be_one_that_the_model_can_do():
    embeds, scores = PoolingSpec(PoolingKind.MEAN), PoolingSpec(labels=1)
    assert choose_task("auto", None) is choose_task("generate", None) is choose_task("generate", embeds) is None
    assert choose_task("auto", embeds) is choose_task("embed", embeds) is embeds
    assert choose_task("embed", None) == PoolingSpec()
    assert choose_task("score", scores).task is Task.SCORE
    with pytest.raises(ValueError, match="no score head"):
        choose_task("score", embeds)
    with pytest.raises(ValueError, match="scores pairs of texts and nothing else"):
        choose_task("generate", scores)


def test_a_text_as_long_as_the_context_fits_and_one_longer_is_refused_with_the_numbers(tmp_path):
    write_embedder(tmp_path, "lasttoken")
    found, scheduler = compute(tmp_path, [[1] * 100], pages=7)  # 112 tokens of room
    assert len(found) == 1
    scheduler.add([NewRequest(7, [1] * 112, SamplingParams())])
    with pytest.raises(NeverFits, match="The prompt has 113 tokens, but the KV cache holds 112 tokens"):
        scheduler.add([NewRequest(8, [1] * 113, SamplingParams())])


def test_a_fault_of_one_text_is_nobody_elses(tmp_path):
    model = write_embedder(tmp_path, "lasttoken")
    runner = load_runner(
        open_model(tmp_path), precision="float32", device="cpu", kv_cache_bytes=1 << 21, pooling=PoolingSpec()
    )
    cache = PrefixCache(BlockPool(20), runner.geometry.block_size, model_digest=b"m", kv_dtype="float32")
    scheduler = Scheduler(SchedulerConfig(), cache, eos_token_ids=frozenset(), pooling=PoolingSpec())
    texts = [TEXTS[1], [5, 99_999, 7], TEXTS[2]]
    scheduler.add([NewRequest(i, list(text), SamplingParams()) for i, text in enumerate(texts)])
    plan = scheduler.schedule()
    outputs = {output.request_id: output for output in scheduler.update(plan, runner.execute(plan))}
    assert "token id 99999 is outside the vocabulary" in outputs[1].error
    for i in (0, 2):
        vector = np.frombuffer(outputs[i].vector, dtype="<f4")
        assert np.allclose(vector, reference_vector(model, texts[i], "lasttoken"), atol=2e-5)
    assert cache.pool.num_used == 0


def test_a_model_that_generates_can_be_asked_for_vectors(tmp_path):
    model = random_model("Llama", max_position_embeddings=1024)
    model.save_pretrained(tmp_path)
    write_byte_tokenizer(tmp_path)
    assert open_model(tmp_path).info.pooling is None
    (vector,), _ = compute(tmp_path, [TEXTS[2]], spec=choose_task("embed", None))
    assert np.allclose(vector, reference_vector(model.model, TEXTS[2], "lasttoken"), atol=2e-5)
    assert isinstance(model, transformers.LlamaForCausalLM)
