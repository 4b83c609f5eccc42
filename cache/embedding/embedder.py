"""The embedding model: text in, unit vectors out, and an honest no where it would have to guess.

Any sentence-transformers model works, by name or by folder. all-MiniLM-L6-v2 comes from an installed package, and so
does a multilingual one, so that no network is needed. A text longer than the model's window, or with characters that
it does not know, is refused instead of truncated or blurred: such vectors make different texts look equal.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from cache.embedding.folder import (
    BUNDLED,
    MULTILINGUAL,
    EmbedderError,
    UnsupportedModel,
    describe,
    find_model,
    fingerprint,
)

Backend = Literal["torch", "onnx", "onnx-int8", "numpy"]
BackendChoice = Literal["auto", "torch", "onnx", "onnx-int8"]
BACKENDS = get_args(BackendChoice)

# A sentence per script. A tokenizer that knows a script cuts it into pieces of more than one letter on average. In
# Chinese many words are one letter: 1.2 are good there, and 1.1 the most of a script that is spelt out.
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
_MIN_LETTERS_PER_TOKEN = 1.15

Vectors = NDArray[np.float32]


class Refused(ValueError):
    """The model cannot embed this text faithfully. `reason` is `too_long` or `script_not_covered`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Embedder:
    """A loaded model. `embed` and `check` may run in two threads, each in one at a time.

    Attributes:
        name: as it was asked for.
        backend: what computes its vectors.
        dimension: length of a vector.
        max_tokens: window of the model, special tokens included.
        fingerprint: see `fingerprint`.
        scripts: scripts that the tokenizer knows as more than single letters.
    """

    def __init__(
        self, name: str, *, backend: BackendChoice = "auto", threads: int = 1, store: Path | None = None
    ) -> None:
        """Load the model; takes a second, and some more where its ONNX file has to be made first.

        Args:
            store: where its ONNX file is kept, unless `default_store` has it; None: there.

        Raises:
            EmbedderError: there is no such model, or the backend cannot run it.
        """
        chosen = choose(name, backend)
        self.name = name
        self.backend = chosen.backend
        self.fingerprint = chosen.fingerprint
        self._encoder = _load(chosen, threads, [store] if store else [])
        self.dimension = self._encoder.dimension
        self.max_tokens = self._encoder.max_tokens
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
        if self._encoder.unknown_id in self._encoder.token_ids(probe):
            return False
        words = "".join(character for character in probe if character.isalpha() or character == " ")
        special = len(self._encoder.token_ids("a")) - 1
        letters = sum(character.isalpha() for character in words)
        return letters >= _MIN_LETTERS_PER_TOKEN * (len(self._encoder.token_ids(words)) - special)


class Encoder(Protocol):
    """What a backend does. `token_ids` and `encode` may run in two threads.

    Attributes:
        dimension: length of a vector.
        max_tokens: window of the model, special tokens included.
        unknown_id: of the token for what the tokenizer does not know; None if it knows everything.
    """

    dimension: int
    max_tokens: int
    unknown_id: int | None

    def token_ids(self, text: str) -> list[int]: ...

    def encode(self, texts: list[str]) -> Vectors: ...


@dataclass(frozen=True)
class Choice:
    """Which files a model is, what computes its vectors, and the fingerprint of both."""

    name: str
    folder: Path
    backend: Backend
    fingerprint: str


def choose(name: str, backend: BackendChoice = "auto") -> Choice:
    """Find the model and settle its backend; loads nothing.

    `auto` is `onnx-int8` for the bundled model, whose decisions were measured, `onnx` for any other BERT encoder, whose
    vectors are PyTorch's, and `torch` for the rest.

    Raises:
        EmbedderError: there is no such model, or the backend asked for cannot run it.
    """
    folder = find_model(name)
    settled: Backend
    if name == MULTILINGUAL:
        if backend != "auto":
            raise EmbedderError(f"The embedder '{name}' has a backend of its own: leave embedder_backend at auto.")
        settled = "numpy"
    elif backend == "auto":
        settled = _best(name, folder)
    else:
        settled = backend
        if settled != "torch":
            describe(folder)
            if not _onnx_installed():
                raise EmbedderError(f"The backend '{settled}' needs the packages onnx and onnxruntime.")
    return Choice(name, folder, settled, fingerprint(folder, settled))


def default_store() -> Path:
    """Where ONNX files are kept if nobody says where: the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tierline" / "embedders"


def _best(name: str, folder: Path) -> Backend:
    if not _onnx_installed():
        return "torch"
    try:
        describe(folder)
    except UnsupportedModel:
        return "torch"
    return "onnx-int8" if name in BUNDLED else "onnx"


def _onnx_installed() -> bool:
    return all(importlib.util.find_spec(package) is not None for package in ("onnx", "onnxruntime"))


def _load(chosen: Choice, threads: int, stores: list[Path]) -> Encoder:
    if chosen.backend == "torch":
        from cache.embedding.torch_backend import TorchEncoder

        return TorchEncoder(chosen.folder, chosen.name, threads=threads)
    if chosen.backend == "numpy":
        from cache.embedding.multilingual import MultilingualEncoder

        return MultilingualEncoder(chosen.folder, threads=threads)
    from cache.embedding.onnx_backend import OnnxEncoder
    from cache.embedding.prepare import prepared

    model = describe(chosen.folder)
    folder = prepared(model, chosen.backend, chosen.fingerprint, [*stores, default_store()])
    return OnnxEncoder.prepared(model, folder, threads=threads)


__all__ = ["BACKENDS", "BackendChoice", "Choice", "Embedder", "EmbedderError", "Refused", "Vectors", "choose"]
