"""The real embedder: its vectors, what it refuses, how it is found."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest

from cache.embedding.batcher import Batcher
from cache.embedding.embedder import Embedder, EmbedderError, Refused
from cache.embedding.folder import find_model, fingerprint


def test_vectors_are_unit_vectors_and_the_same_in_any_batch(embedder: Embedder) -> None:
    texts = ["What is the capital of France?", "How do I reset my password?", "hi"]
    together = embedder.embed(texts)
    assert together.shape == (3, 384)
    assert together.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-5)
    for text, vector in zip(texts, together, strict=True):
        np.testing.assert_allclose(embedder.embed([text])[0], vector, atol=1e-5)
    assert embedder.embed([]).shape == (0, 384)


def test_another_model_is_loaded_from_its_folder(minilm_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(minilm_path, folder)
    pooling = folder / "1_Pooling" / "config.json"
    cls = pooling.read_text().replace('"pooling_mode_mean_tokens": true', '"pooling_mode_mean_tokens": false')
    pooling.write_text(cls.replace('"pooling_mode_cls_token": false', '"pooling_mode_cls_token": true'))
    other = Embedder(str(folder), backend="torch")
    assert (other.dimension, other.max_tokens, other.scripts) == (384, 256, {"latin"})
    vectors = other.embed(["What is the capital of France?", "hi"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    with pytest.raises(Refused):
        other.check("如何")


def test_it_knows_what_it_covers(embedder: Embedder) -> None:
    assert embedder.scripts == {"latin"}
    embedder.check("What is the capital of France?")
    for text in ("法国的首都是哪里", "What does 😀 mean?"):
        with pytest.raises(Refused) as refused:
            embedder.check(text)
        assert refused.value.reason == "script_not_covered"


def test_the_window_is_never_exceeded(embedder: Embedder) -> None:
    embedder.check("a " * 254)
    for text in ("a " * 255, "a" * 20_000):
        with pytest.raises(Refused) as refused:
            embedder.check(text)
        assert refused.value.reason == "too_long"


def test_a_changed_file_is_another_fingerprint(minilm_path: Path, tmp_path: Path, embedder: Embedder) -> None:
    copy = tmp_path / "model"
    shutil.copytree(minilm_path, copy)
    assert fingerprint(copy, embedder.backend) == embedder.fingerprint
    assert len({fingerprint(copy, backend) for backend in ("torch", "onnx", "onnx-int8")}) == 3
    pooling = copy / "1_Pooling" / "config.json"
    pooling.write_text(
        pooling.read_text().replace('"pooling_mode_mean_tokens": true', '"pooling_mode_mean_tokens": false')
    )
    assert fingerprint(copy, embedder.backend) != embedder.fingerprint


def test_a_model_is_found_by_name_and_by_folder(minilm_path: Path) -> None:
    assert find_model("all-MiniLM-L6-v2") == find_model(str(minilm_path)) == minilm_path


def test_a_folder_that_is_no_model_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(EmbedderError, match="not a sentence-transformers model"):
        Embedder(str(tmp_path))


def test_an_unknown_name_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EmbedderError, match="neither a folder nor bundled"):
        find_model("no-such-owner/no-such-model")


async def test_batches_form_under_load_and_give_each_its_own_vector(embedder: Embedder) -> None:
    batcher = Batcher(embedder, max_batch_size=4, max_wait_ms=5)
    batcher.start()
    try:
        texts = [f"question number {i}" for i in range(20)]
        vectors = await asyncio.gather(*(batcher.embed(text) for text in [*texts, texts[0]]))
        np.testing.assert_allclose(vectors[:20], embedder.embed(texts), atol=1e-5)
        assert batcher.texts == 20
        assert 5 <= batcher.batches <= 7
        await batcher.embed(texts[3])
        assert batcher.texts == 20, "what was embedded lately is remembered"
    finally:
        await batcher.close()


async def test_a_batch_goes_on_when_one_of_its_askers_leaves(embedder: Embedder) -> None:
    batcher = Batcher(embedder, max_batch_size=4, max_wait_ms=5)
    batcher.start()
    try:
        leaving = asyncio.create_task(batcher.embed("same text"))
        staying = asyncio.create_task(batcher.embed("same text"))
        await asyncio.sleep(0)
        leaving.cancel()
        assert (await staying).shape == (384,)
    finally:
        await batcher.close()
