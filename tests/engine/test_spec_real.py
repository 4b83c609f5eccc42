"""Speculation with real models: the same tokens in float32, however they were proposed, in whatever schedule."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path

import pytest
import torch

from engine import threads
from engine.__main__ import main
from engine.config import EngineConfig
from engine.core import load_model
from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import PrefixCache
from engine.limits import SchedulerConfig
from engine.load_runner import load_runner
from engine.loader import open_model
from engine.messages import NewRequest
from engine.runner import ModelRunner
from engine.scheduling.scheduler import Scheduler
from engine.spec.draft_model import DraftModel
from engine.spec.loading import load_speculator, open_draft
from engine.spec.ngram import NgramProposer
from engine.spec.speculator import MOST_DRAFTS, Speculator
from engine.text.tokenizer import Tokenizer
from engine.types import SamplingParams
from tests.engine.fakes import check_plan
from tests.engine.models import write_model

PHRASE = [17, 93, 45, 201, 88, 139]
PROMPTS = [[5, *PHRASE, 77, *PHRASE[:3]], [6, 7, 8], PHRASE * 6, [301, 9] * 10]
NUM_TOKENS = 24
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=2),
    "seeded": SamplingParams(seed=7, logprobs=1),
    "cool, penalised": SamplingParams(seed=3, temperature=0.3, repetition_penalty=1.1, frequency_penalty=0.2),
    "top_p, min_tokens": SamplingParams(seed=11, top_p=0.7, min_tokens=10, stop_token_ids=frozenset(range(0, 320, 9))),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("speculation")
    for name, seed in (("model", 0), ("stranger", 1)):
        write_model(folder / f"{name}.gguf", seed=seed)
    write_model(folder / "other.gguf", sizes={"vocab_size": 640})
    return {path.stem: path for path in folder.iterdir()}


def load(path: Path) -> ModelRunner:
    runner = load_runner(path, precision="float32", max_model_len=160, kv_cache_bytes=4 << 20, device="cpu")
    runner.attention.kv_cache.fill_(torch.nan)  # what nobody has written must not be read
    return runner


@pytest.fixture(scope="module")
def runner(paths: dict[str, Path]) -> ModelRunner:
    return load(paths["model"])


class Wild:
    """Proposes anything at all."""

    waits_for_copies = False
    seconds_per_draft = 0.0

    def __init__(self) -> None:
        self.dice = random.Random(1)

    def offers(self, requests, most):
        return [self.dice.randint(0, most) for _ in requests]

    def propose(self, counts):
        return {request: [self.dice.randrange(320) for _ in range(count)] for request, count in counts.items()}

    def forget(self, request):
        pass


def proposer(name, paths, runner):
    if name == "ngram":
        return NgramProposer()
    if name == "wild":
        return Wild()
    small = load(paths[name])
    small.sampler = runner.sampler
    return DraftModel(small, max_num_batched_tokens=512)


def make_scheduler(runner, speculator=None, *, num_blocks=80, budget=64):
    cache = PrefixCache(
        BlockPool(min(num_blocks, runner.geometry.num_blocks)), 16, model_digest=b"", kv_dtype="float32"
    )
    config = SchedulerConfig(8, budget, max_model_len=runner.max_model_len)
    return Scheduler(config, cache, eos_token_ids=frozenset({1}), speculator=speculator)


def run(scheduler, runner, params, prompts=PROMPTS, *, num_tokens=NUM_TOKENS, before_step=lambda number: None):
    """Tokens and log-probabilities by prompt, and the number of steps."""
    params = dataclasses.replace(params, max_tokens=num_tokens)
    scheduler.add([NewRequest(i, prompt, params) for i, prompt in enumerate(prompts)])
    tokens, logprobs = [[] for _ in prompts], [[] for _ in prompts]
    for number in itertools.count(1):
        if not scheduler.has_work:
            break
        before_step(number)
        plan = scheduler.schedule()
        check_plan(scheduler, plan)
        for output in scheduler.update(plan, runner.execute(plan)):
            assert output.error is None
            tokens[output.request_id] += output.token_ids
            logprobs[output.request_id] += [entry.logprob for entry in output.logprobs or ()]
        scheduler.check()
    assert scheduler.cache.pool.num_used == 0
    return tokens, logprobs, number - 1


@pytest.fixture(scope="module")
def plain(runner):
    return {name: run(make_scheduler(runner), runner, params) for name, params in PARAMS.items()}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("source", ["ngram", "wild", "model", "stranger"])
def test_the_tokens_are_those_of_no_speculation(paths, runner, plain, source, name):
    speculator = Speculator(proposer(source, paths, runner), 4, adaptive=False)
    tokens, logprobs, steps = run(make_scheduler(runner, speculator), runner, PARAMS[name])
    want, want_logprobs, want_steps = plain[name]
    assert tokens == want
    for ours, theirs in zip(logprobs, want_logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    stats = speculator.stats
    assert source == "ngram" or stats.drafted_tokens > 20  # what a random model draws seldom repeats
    if source == "model":  # it draws by the same numbers, so it is right even where the draw is random
        assert stats.accepted_tokens == stats.drafted_tokens
        assert steps < want_steps / 2
    if source == "wild":
        assert stats.accepted_tokens < stats.drafted_tokens / 4


@pytest.mark.parametrize("source", ["ngram", "wild", "model"])
def test_nor_does_the_schedule_show(paths, runner, plain, source):
    """A small pool, small steps, prompts found in the cache, and a preemption at every place."""
    speculator = Speculator(proposer(source, paths, runner), 4, adaptive=False)
    scheduler = make_scheduler(runner, speculator, num_blocks=12, budget=9)
    for at in (2, 5, 9, 14):

        def preempt(number, at=at):
            if number == at:
                for victim in list(scheduler._running)[1:]:
                    scheduler._preempt(victim)

        assert run(scheduler, runner, PARAMS["greedy"], before_step=preempt)[0] == plain["greedy"][0]
    assert scheduler.stats.preemptions > 0
    assert scheduler.cache.stats.hit_tokens > 0
    assert speculator.stats.drafted_tokens > 0


def test_settings_lead_to_a_speculator_with_pages_of_its_own(paths, monkeypatch):
    monkeypatch.setattr(threads, "configure", lambda number, **_: number)  # torch is here already

    def config(**fields):
        standard = {"model_path": str(paths["model"]), "served_name": "tiny", "precision": "float32", "device": "cpu"}
        return EngineConfig(**standard, threads=1, max_model_len=160, kv_cache_bytes=4 << 20, **fields)

    drafting = config(speculative="draft", draft_model_path=str(paths["stranger"]), num_speculative_tokens=3)
    core, ready = load_model(drafting, None)
    alone, ready_alone = load_model(config(), None)
    assert ready.num_blocks == ready_alone.num_blocks // 2, "two models of the same size share the budget"
    scheduler = core._scheduler
    assert (
        run(scheduler, core._runner, PARAMS["greedy"])[0] == run(alone._scheduler, alone._runner, PARAMS["greedy"])[0]
    )
    assert core.stats().drafted_tokens > 0
    assert alone.stats().drafted_tokens == 0
    scratch = core._runner.ledger().scratch_bytes - alone._runner.ledger().scratch_bytes
    assert scratch >= MOST_DRAFTS * 320 * 4, "each draft has logits of its own"

    model = open_model(paths["model"])
    assert open_draft(config(), model) is None
    with pytest.raises(ValueError, match=r"640 tokens that are not those of .* \(320\)"):
        open_draft(config(speculative="draft", draft_model_path=str(paths["other"])), model)
    ngram = load_speculator(config(speculative="ngram"), core._runner, None, threads=1)
    assert isinstance(ngram._proposer, NgramProposer)


def test_a_draft_model_and_its_setting_need_each_other(paths, capsys):
    for options in (
        ["--speculative", "draft"],
        ["--draft-model", "x"],
        ["--speculative", "ngram", "--draft-model", "x"],
    ):
        assert main(["--model", str(paths["model"]), *options]) == 1
        assert "need each other" in capsys.readouterr().err
    assert main(["--model", str(paths["model"]), "--speculative", "draft", "--draft-model", "none.gguf"]) == 1
    assert "none.gguf: no such file" in capsys.readouterr().err


def test_a_quoting_answer_takes_far_fewer_steps_and_is_the_same(smollm2_path):
    """SmolLM2 copies a list that stands in its prompt."""
    runner = load_runner(
        smollm2_path, precision="float32", threads=1, max_model_len=512, kv_cache_bytes=100 << 20, device="cpu"
    )
    tokenizer = Tokenizer(open_model(smollm2_path).info)
    lines = "alpha river 41\nbeta stone 73\ngamma cloud 19\ndelta flame 58\n"
    prompt = tokenizer.encode(f"List:\n{lines}\nThe same list again:\n{lines}\nThe same list again:\n")
    params = SamplingParams(temperature=0.0)
    want, _, want_steps = run(make_scheduler(runner, budget=256), runner, params, [prompt], num_tokens=40)
    speculator = Speculator(NgramProposer(), 4)
    tokens, _, steps = run(make_scheduler(runner, speculator, budget=256), runner, params, [prompt], num_tokens=40)
    assert tokens == want
    assert steps <= want_steps / 2
    print(f"{steps} steps instead of {want_steps}; {speculator.stats}")
