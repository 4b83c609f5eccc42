"""Gemma 3 270M as published: windows of 512, two rotary embeddings, four norms per layer, K-quants, on real text.

Its licence has to be accepted by whoever pulls it (`tierline models pull gemma3-270m`); without it these are skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engine.load_runner import load_runner
from engine.loader.source import open_model
from engine.text.tokenizer import Tokenizer
from tests.engine.models import all_logits, generate

FILE = "gemma-3-270m-q4_k_m.gguf"
ROOT = Path(__file__).parents[2]
PROMPT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Japan is"


@pytest.fixture(scope="module")
def gemma() -> Path:
    named = os.environ.get("TIERLINE_TEST_GEMMA")
    found = [Path(named)] if named else sorted((ROOT / "var").rglob(FILE))
    if not found:
        pytest.skip("no Gemma here: `tierline models pull gemma3-270m`, or TIERLINE_TEST_GEMMA=FILE")
    return found[0]


@pytest.mark.slow
def test_it_knows_capitals_and_copies_beyond_its_window(gemma: Path) -> None:
    model = open_model(gemma)
    assert model.spec.num_parameters == 268_098_176
    assert [layer.window for layer in model.spec.layers] == ([512] * 5 + [0]) * 3
    tokenizer = Tokenizer(model.info)
    runner = load_runner(model, max_model_len=1024, kv_cache_bytes=1 << 27, device="cpu")
    prompt = list(tokenizer.encode(PROMPT))
    assert tokenizer.decode(generate(runner, prompt, 2, pages=[1, 2, 3])).startswith(" Tokyo")
    # A text said again and again is foreseen, and goes on being so where the first times have left the window.
    text = (prompt[:1] + prompt[1:] * 60)[:900]
    shares = all_logits(runner, text, list(range(1, 58)), 128).log_softmax(-1)
    losses = -shares[:-1].gather(1, torch.tensor(text[1:]).unsqueeze(1)).squeeze(1)
    assert losses[:20].mean() > 1
    assert losses[100:500].mean() < 0.1
    assert losses[500:].mean() < 0.05
