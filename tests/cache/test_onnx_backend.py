"""The ONNX backends: vectors beside PyTorch's, which backend is chosen, and how a model is prepared."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cache.embedding import prepare
from cache.embedding.embedder import Embedder, EmbedderError, choose, default_store
from cache.embedding.folder import MULTILINGUAL, UnsupportedModel, describe, fingerprint
from cache.embedding.onnx_backend import ABOUT, MODEL, OnnxEncoder
from cache.embedding.probes import PROBES
from cache.embedding.torch_backend import TorchEncoder

TEXTS = [
    "How many instalments can I pay a sofa of 1,299 EUR in?",
    "Ist das hier Englisch?",
    "x" * 90,
    "What must a landlord do when the heating fails in winter? " * 8,
    "hello",
    "",
]


@pytest.fixture(scope="module")
def exact(minilm_path: Path) -> TorchEncoder:
    return TorchEncoder(minilm_path, "minilm", threads=1)


@pytest.fixture(scope="module")
def prepared_int8(embedder: Embedder, minilm_path: Path) -> Path:
    """Where the session's embedder was loaded from."""
    return default_store() / prepare.folder_name(fingerprint(minilm_path, "onnx-int8"))


def test_float32_gives_the_vectors_of_pytorch(exact: TorchEncoder, minilm_path: Path) -> None:
    model = describe(minilm_path)
    found = OnnxEncoder(model, prepare.build(model, "onnx").SerializeToString(), threads=1)
    np.testing.assert_allclose(found.encode(TEXTS), exact.encode(TEXTS), atol=2e-6)
    assert (found.dimension, found.max_tokens) == (exact.dimension, exact.max_tokens)


def test_int8_moves_the_cosine_of_two_texts_little(embedder: Embedder, exact: TorchEncoder) -> None:
    assert embedder.backend == "onnx-int8"
    found, wanted = embedder.embed(TEXTS), exact.encode(TEXTS)
    assert float((found * wanted).sum(axis=1).min()) > 0.99
    assert float(np.abs(found @ found.T - wanted @ wanted.T).max()) < 0.03


def test_a_vector_does_not_depend_on_the_company(embedder: Embedder) -> None:
    """Else what a question finds would depend on who else asks."""
    together = embedder.embed(TEXTS * 3)
    for text, vector in zip(TEXTS * 3, together, strict=True):
        np.testing.assert_allclose(embedder.embed([text])[0], vector, atol=1e-6)


def test_the_tokens_are_those_of_transformers(embedder: Embedder, exact: TorchEncoder) -> None:
    for text in (*PROBES, *TEXTS, "Ünïcödé ＦＵＬＬ\u200bwidth\t\x00 tabs", "法国的首都", "a😀b", "[CLS] [MASK] it's"):
        if exact.unknown_id not in exact.token_ids(text):
            assert embedder.count(text) == len(exact.token_ids(text)), text


def test_it_loads_neither_pytorch_nor_transformers(embedder: Embedder) -> None:
    """A process that finds the model prepared starts in a second with a third of the memory."""
    code = (
        "import sys; from cache.embedding.embedder import Embedder; Embedder('all-MiniLM-L6-v2').embed(['hi']);"
        "print([name for name in ('torch', 'transformers', 'sentence_transformers', 'onnx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def copied(minilm_path: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(minilm_path, folder)
    return folder


def change(folder: Path, file: str, **fields: object) -> None:
    path = folder / file
    known = json.loads(path.read_bytes()) if path.is_file() else {}
    path.write_text(json.dumps({**known, **fields}))


def test_auto_quantises_only_what_was_measured(copied: Path) -> None:
    assert choose("all-MiniLM-L6-v2").backend == "onnx-int8"
    assert choose(str(copied)).backend == "onnx"
    change(copied, "config.json", model_type="mpnet")
    assert choose(str(copied)).backend == "torch"
    with pytest.raises(UnsupportedModel, match="model_type must be 'bert'"):
        choose(str(copied), "onnx")


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (lambda folder: change(folder, "config.json", hidden_act="relu"), "hidden_act"),
        (lambda folder: change(folder, "config.json", position_embedding_type="relative_key"), "position_embedding"),
        (lambda folder: change(folder, "sentence_bert_config.json", do_lower_case=True), "do_lower_case"),
        (lambda folder: change(folder, "config_sentence_transformers.json", default_prompt_name="q"), "default_prompt"),
        (lambda folder: change(folder, "1_Pooling/config.json", pooling_mode_max_tokens=True), "mean or cls"),
        (lambda folder: (folder / "modules.json").write_text('[{"type": "a.WordEmbeddings", "path": ""}]'), "one pool"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
    ],
)
def test_what_would_change_the_vectors_is_refused(copied: Path, alter: Callable[[Path], object], words: str) -> None:
    alter(copied)
    with pytest.raises(UnsupportedModel, match=words):
        describe(copied)


def test_pooling_by_the_first_token_and_a_shorter_window(copied: Path) -> None:
    change(copied, "1_Pooling/config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)
    change(copied, "sentence_bert_config.json", max_seq_length=32)
    exact = TorchEncoder(copied, "cls", threads=1)
    graph = prepare.build(describe(copied), "onnx").SerializeToString()
    found = OnnxEncoder(describe(copied), graph, threads=1)
    assert found.max_tokens == exact.max_tokens == 32
    np.testing.assert_allclose(found.encode(list(PROBES[:6])), exact.encode(list(PROBES[:6])), atol=2e-6)


def test_a_damaged_file_is_never_used(prepared_int8: Path, minilm_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "prepared"
    shutil.copytree(prepared_int8, folder)
    with (folder / MODEL).open("r+b") as file:
        file.seek(30_000_000)
        file.write(b"\x01\x02\x03")
    with pytest.raises(EmbedderError, match="damaged: delete the folder"):
        OnnxEncoder.prepared(describe(minilm_path), folder, threads=1)
    (folder / ABOUT).write_bytes(b"{}")
    with pytest.raises(EmbedderError, match="no prepared model"):
        OnnxEncoder.prepared(describe(minilm_path), folder, threads=1)


def test_vectors_that_changed_since_the_model_was_made_are_refused(
    prepared_int8: Path, minilm_path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "prepared"
    shutil.copytree(prepared_int8, folder)
    vectors = np.load(folder / "probes.npy")
    np.save(folder / "probes.npy", vectors[::-1].copy())
    with pytest.raises(EmbedderError, match="other vectors on this machine"):
        OnnxEncoder.prepared(describe(minilm_path), folder, threads=1)


def test_a_model_too_far_from_pytorchs_is_not_written(
    minilm_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(prepare.MOST_SHIFT, "onnx-int8", 0.001)
    with pytest.raises(EmbedderError, match=r"set cache\.embedder_backend to torch"):
        prepare.make(describe(minilm_path), "onnx-int8", tmp_path / "store" / "model")
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.slow
def test_two_processes_prepare_one_model(minilm_path: Path, tmp_path: Path) -> None:
    model, print_ = describe(minilm_path), fingerprint(minilm_path, "onnx-int8")
    with ThreadPoolExecutor(2) as both:
        first, second = both.map(lambda _: prepare.prepared(model, "onnx-int8", print_, [tmp_path]), range(2))
    assert first == second
    assert [entry.name for entry in tmp_path.iterdir()] == [first.name], "no draft is left"
    assert OnnxEncoder.prepared(model, first, threads=1).dimension == 384


def test_a_folder_that_cannot_be_written_is_a_clear_error(minilm_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EmbedderError, match=r"could not be prepared: .*(Not a directory|File exists)"):
        prepare.prepared(describe(minilm_path), "onnx", "f" * 64, [tmp_path / "file"])


def test_the_multilingual_embedder_by_name() -> None:
    found = Embedder(MULTILINGUAL)
    assert {"latin", "han"} <= found.scripts
    assert (found.dimension, found.backend) == (512, "numpy")
    vectors = found.embed(
        ["如何打开深色模式？", "怎样打开深色模式？", "法国的首都是哪里？", "What is the capital of France?"]
    )
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    np.testing.assert_allclose(found.embed(["法国的首都是哪里？"])[0], vectors[2], atol=1e-5)
    assert float(vectors[0] @ vectors[1]) > 0.9 > 0.7 > float(vectors[2] @ vectors[3]) > float(vectors[0] @ vectors[2])
    found.check("法国的首都是哪里？")
    assert found.fingerprint != Embedder("all-MiniLM-L6-v2").fingerprint
    with pytest.raises(EmbedderError, match="leave embedder_backend at auto"):
        choose(MULTILINGUAL, "onnx")


def test_the_default_store_is_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_store() == tmp_path / "tierline" / "embedders"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_store() == Path(os.path.expanduser("~/.cache/tierline/embedders"))
