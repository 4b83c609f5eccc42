"""EAGLE-3 heads: drafts are those of an independent computation, whatever the schedule, and the text stays the same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine import threads
from engine.__main__ import main
from engine.config import EngineConfig
from engine.core import load_model
from engine.loader import ModelFileError, open_model
from engine.loader.eagle3 import HeadFiles
from engine.messages import NewRequest
from engine.runner import ModelRunner
from engine.spec.eagle import EagleProposer
from engine.spec.loading import load_head
from engine.spec.speculator import Speculator
from engine.types import SamplingParams
from tests.engine.eagle_heads import (
    TAPS,
    config_of,
    entries,
    expected_drafts,
    head_logits,
    inner_states,
    random_weights,
    write_head,
)
from tests.engine.models import write_model
from tests.engine.test_spec_real import PARAMS, PROMPTS, load, make_scheduler, run

GREEDY = SamplingParams(temperature=0.0)
DRAFT_VOCAB = 200


@dataclasses.dataclass
class World:
    path: Path
    model: transformers.PreTrainedModel  # the same weights
    weights: dict[str, torch.Tensor]

    @property
    def spec(self):
        return open_model(self.path).spec


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("eagle")
    model = write_model(folder / "model.gguf", sizes={"num_hidden_layers": 5})
    found = World(folder / "model.gguf", model, {})
    found.weights = random_weights(found.spec, DRAFT_VOCAB)
    write_head(folder / "head", found.weights, config_of(found.spec, found.weights))
    return found


def open_head(world: World, folder: str = "head") -> HeadFiles:
    return HeadFiles(world.path.parent / folder, world.spec)


class Watched:
    """A proposer, every fourth of whose drafts is compared with the computation without pages."""

    def __init__(self, proposer: EagleProposer, world: World, **options: bool) -> None:
        self.inner, self.world, self.options = proposer, world, options
        self.rounds = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, counts):
        head = self.inner._head
        expected = {}
        for request, count in counts.items():
            self.rounds += 1
            if self.rounds % 4 != 1:
                continue
            drafts, logits = expected_drafts(
                self.world.model, self.world.weights, request.token_ids, count, **self.options
            )
            fused = head.last_fused[[request.block_table[(request.num_tokens - 2) // head.block_size]]]
            with torch.inference_mode():
                found = head.logits(head.forward([self.inner._next(request, [])], fused))[0]
            torch.testing.assert_close(found[head._tokens], logits, atol=2e-4, rtol=1e-3)
            assert found.isinf().sum() == 320 - DRAFT_VOCAB
            if request.params.temperature == 0:
                expected[request] = drafts
        proposed = self.inner.propose(counts)
        assert {request: proposed[request] for request in expected} == expected
        return proposed


@pytest.fixture
def runner(world: World) -> ModelRunner:
    return load(world.path)


@pytest.fixture
def watched(world: World, runner: ModelRunner) -> Watched:
    proposer = load_head(open_head(world), runner)
    proposer._head.kv.fill_(torch.nan)  # what nobody has written must not be read
    proposer._head.last_fused.fill_(torch.nan)
    return Watched(proposer, world)


@pytest.fixture(scope="module")
def plain(world: World):
    runner = load(world.path)
    names = ("greedy", "seeded", "cool, penalised")
    return {name: run(make_scheduler(runner), runner, PARAMS[name]) for name in names}


@pytest.mark.parametrize("name", ["greedy", "seeded", "cool, penalised"])
def test_the_text_is_the_same_and_the_drafts_are_the_heads(runner, watched, plain, name) -> None:
    speculator = Speculator(watched, 3, adaptive=False)
    tokens, logprobs, _ = run(make_scheduler(runner, speculator), runner, PARAMS[name])
    assert tokens == plain[name][0]
    for ours, theirs in zip(logprobs, plain[name][1], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert watched.rounds > 20
    assert 0 < speculator.stats.accepted_tokens < speculator.stats.drafted_tokens or name != "greedy"


def test_neither_chunks_nor_cache_nor_preemption_show(runner, watched, plain) -> None:
    scheduler = make_scheduler(runner, Speculator(watched, 3, adaptive=False), num_blocks=12, budget=9)
    for at in (3, 9):

        def preempt(number, at=at):
            if number == at:
                for victim in list(scheduler._running)[1:]:
                    scheduler._preempt(victim)

        assert run(scheduler, runner, PARAMS["greedy"], before_step=preempt)[0] == plain["greedy"][0]
    assert scheduler.stats.preemptions > 0
    assert scheduler.cache.stats.hit_tokens > 0
    assert watched.rounds > 50


@pytest.mark.parametrize("length", [1, 2, 16, 17, 32])
def test_siblings_share_the_heads_pages(runner, watched, length) -> None:
    """They part behind the prompt: in the middle of a page, or at its end."""
    scheduler = make_scheduler(runner, Speculator(watched, 3, adaptive=False))
    prompt = [5 + i % 90 for i in range(length)]
    scheduler.add([NewRequest(i, prompt, SamplingParams(seed=i, max_tokens=20), None, 1) for i in range(4)])
    texts: dict[int, list[int]] = {}
    while scheduler.has_work:
        plan = scheduler.schedule()
        for output in scheduler.update(plan, runner.execute(plan)):
            texts.setdefault(output.request_id, []).extend(output.token_ids)
        scheduler.check()
    assert len({tuple(text) for text in texts.values()}) == 4
    assert watched.rounds > 10


def test_the_other_layout_names_and_variants(world, runner, tmp_path) -> None:
    """The library's layout, the norm before the residual, and an embedding of its own."""
    config = config_of(world.spec, world.weights)
    layer = {name: config.pop(name) for name in list(config) if name not in ("draft_vocab_size", "architectures")}
    layer.pop("eagle_aux_hidden_state_layer_ids")
    nested = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in TAPS]}  # counted by their outputs
    config |= {"transformer_layer_config": layer, "norm_before_residual": True, "eagle_config": nested}
    weights = {name.replace("midlayer.", "layers.0."): value for name, value in world.weights.items()}
    weights["embed_tokens.weight"] = world.model.get_input_embeddings().weight.detach()
    head = HeadFiles(write_head(tmp_path / "head", weights, config), world.spec)
    assert head.spec.taps == TAPS
    watched = Watched(load_head(head, runner), world, norm_before_residual=True)
    run(make_scheduler(runner, Speculator(watched, 3, adaptive=False)), runner, GREEDY)
    assert watched.rounds > 20


def test_a_trained_head_saves_steps(world, tmp_path) -> None:
    """A little training on the model's own answers, one draft ahead, and its drafts hold there often."""
    runner = load(world.path)
    answers, _, steps = run(make_scheduler(runner), runner, GREEDY, num_tokens=60)
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    states = [inner_states(world.model, text) for text in texts]
    weights = random_weights(world.spec, 320)
    learned = {name: value.requires_grad_() for name, value in weights.items() if value.is_floating_point()}
    embedding = world.model.get_input_embeddings().weight.detach()
    optimiser = torch.optim.Adam(learned.values(), lr=3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        for text, inner in zip(texts, states, strict=True):
            yielded = entries(weights, embedding[text[1:-1]], inner[:-2] @ weights["fc.weight"].T)
            torch.nn.functional.cross_entropy(head_logits(weights, yielded), torch.tensor(text[2:])).backward()
        optimiser.step()
    write_head(tmp_path / "head", weights, config_of(world.spec, weights))
    proposer = load_head(HeadFiles(tmp_path / "head", world.spec), runner)
    speculator = Speculator(proposer, 3, adaptive=False)
    again, _, fewer = run(make_scheduler(runner, speculator), runner, GREEDY, num_tokens=60)
    assert again == answers
    stats = speculator.stats
    print(f"{stats.accepted_tokens} of {stats.drafted_tokens} drafts, {fewer} steps instead of {steps}")
    assert stats.accepted_tokens > stats.drafted_tokens / 4
    assert fewer < 0.7 * steps


def test_compiled_blocks_show_the_same_states(tmp_path) -> None:
    """In the fastest precision too, where all blocks are one call without taps."""
    from gguf.constants import GGMLQuantizationType

    from engine.load_runner import load_runner

    write_model(tmp_path / "q.gguf", sizes={"num_hidden_layers": 5}, encoding=GGMLQuantizationType.Q4_1)
    options = {"max_model_len": 160, "kv_cache_bytes": 4 << 20, "device": "cpu"}
    runner = load_runner(tmp_path / "q.gguf", **options)
    plain = run(make_scheduler(runner), runner, GREEDY, PROMPTS[1:2])
    shown: list[torch.Tensor] = []

    class Reader:
        taps = (0, 2, 4)

        def follow(self, rows, states, results):
            shown.append(states)

        def copy_pages(self, sources, targets):
            raise AssertionError("nothing is shared")

    runner.show_states(Reader())
    assert run(make_scheduler(runner), runner, GREEDY, PROMPTS[1:2])[:2] == plain[:2], "to the last bit"
    compiled, shown = shown, []
    runner.decoder.blocks = None
    run(make_scheduler(runner), runner, GREEDY, PROMPTS[1:2])
    assert len(shown) == len(compiled)
    for one, other in zip(compiled, shown, strict=True):
        assert one.shape[1] == 3 * 96
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_a_head_that_fails_ends_the_drafting_and_nothing_else(runner, watched, plain) -> None:
    speculator = Speculator(watched.inner, 3, adaptive=False)
    scheduler = make_scheduler(runner, speculator)

    def fail(number):
        if number == 6:
            watched.inner._head._fuse = None

    tokens, _, _ = run(scheduler, runner, PARAMS["greedy"], before_step=fail)
    assert tokens == plain["greedy"][0]
    assert speculator._proposer is None
    assert speculator.stats.drafted_tokens > 0


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]):
    def apply(weights, config):
        value = change(weights.pop(name))
        if value is not None:
            weights[name] = value

    return apply


def configured(**values: Any):
    return lambda weights, config: config.update(values)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed("fc.weight", lambda value: None), "no EAGLE-3 head"),
        (changed("fc.weight", lambda value: value[:, :96]), r"'fc.weight' has shape \[96, 96\].*asks for \[96, 288\]"),
        (changed("lm_head.weight", lambda value: None), "'lm_head.weight' is missing"),
        (changed("d2t", lambda value: None), "'d2t' is missing"),
        (changed("d2t", lambda value: value + 1000), "does not map to different tokens of a vocabulary of 320"),
        (changed("d2t", lambda value: value * 0 - torch.arange(len(value))), "does not map to different tokens"),
        (changed("d2t", lambda value: value.float()), "does not hold integers"),
        (changed("midlayer.hidden_norm.weight", lambda value: value[:7]), r"has shape \[7\]"),
        (configured(hidden_size=128), "for a model of width 128, and this one has 96"),
        (configured(target_hidden_size=4096), "for a model of width 4096, and this one has 96"),
        (configured(num_hidden_layers=2), "more than one layer"),
        (configured(draft_vocab_size=900), "900 draft tokens for a model of 320"),
        (configured(eagle_aux_hidden_state_layer_ids=[1, 2]), r"states before layers \[1, 2\]"),
        (configured(eagle_aux_hidden_state_layer_ids=[1, 2, 5]), r"\[1, 2, 5\], and the model has 5 layers"),
        (configured(eagle_aux_hidden_state_layer_ids=["a"]), "no list of numbers"),
        (configured(eagle_aux_hidden_state_layer_ids=None), "the model has 5 layers"),
        (configured(norm_before_fc=True), "'norm_before_fc' is not supported"),
        (configured(eagle_config={"use_aux_hidden_state": False}), "an older kind of EAGLE"),
        (configured(hidden_act="relu2"), "activation 'relu2'"),
    ],
)
def test_files_that_do_not_fit_are_named(world, runner, tmp_path, damage, message) -> None:
    weights, config = dict(world.weights), config_of(world.spec, world.weights)
    damage(weights, config)
    path = write_head(tmp_path / "head", weights, config)
    with pytest.raises(ModelFileError, match=message):
        load_head(HeadFiles(path, world.spec), runner)


def test_what_is_no_head_is_refused(world, tmp_path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json"):
        HeadFiles(tmp_path, world.spec)
    (tmp_path / "config.json").write_text(json.dumps(config_of(world.spec, world.weights)))
    with pytest.raises(ModelFileError, match=r"neither model\.safetensors"):
        HeadFiles(tmp_path, world.spec)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(ModelFileError, match="Convert them to safetensors"):
        HeadFiles(tmp_path, world.spec)


def test_the_paper_s_layers_are_the_default(world, tmp_path) -> None:
    config = config_of(world.spec, world.weights)
    del config["eagle_aux_hidden_state_layer_ids"]
    write_head(tmp_path / "head", world.weights, config)
    deep = dataclasses.replace(world.spec, layers=world.spec.layers[:1] * 32)
    assert HeadFiles(tmp_path / "head", deep).spec.taps == (2, 16, 29)


def test_settings_lead_to_a_head_with_pages_of_its_own(world, monkeypatch, capsys) -> None:
    monkeypatch.setattr(threads, "configure", lambda number, **_: number)  # torch is here already

    def config(**fields):
        standard = {"model_path": str(world.path), "served_name": "tiny", "precision": "float32", "device": "cpu"}
        return EngineConfig(**standard, threads=1, max_model_len=160, kv_cache_bytes=4 << 20, **fields)

    head = str(world.path.parent / "head")
    core, ready = load_model(config(speculative="eagle3", draft_model_path=head), None)
    _, alone = load_model(config(), None)
    proposer = core._scheduler.speculator._proposer
    per_block = 16 * 2 * 5 * 2 * 32 * 4
    assert ready.num_blocks < alone.num_blocks
    held = ready.num_blocks * per_block + proposer._head.kv.nbytes + proposer._head.last_fused.nbytes
    assert held <= 4 << 20, "both share the memory that was allowed"
    assert proposer._head.num_bytes > proposer._head.spec.num_parameters * 4
    run(core._scheduler, core._runner, PARAMS["greedy"])
    assert core.stats().drafted_tokens > 0
    for options in (["--speculative", "eagle3"], ["--speculative", "ngram", "--draft-model", head]):
        assert main(["--model", str(world.path), *options]) == 1
        assert "need each other" in capsys.readouterr().err
