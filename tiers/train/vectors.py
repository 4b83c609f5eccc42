"""Vectors of prompts, as the answer cache embeds them: made by `python -m bench.prompt_vectors`, read by the training.

Texts are found by digest, so that the file holds no text. A prompt without a vector is one that the embedder refuses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiers.features import Message
from tiers.vector import SIZE, Vector, asked

_DIGEST_BYTES = 16


class PromptVectors:
    """Unit vectors [SIZE] by text; None stands for a text that the embedder refuses."""

    def __init__(self, known: Mapping[bytes, NDArray[np.float16] | None] | None = None) -> None:
        self._known = dict(known or {})

    @classmethod
    def load(cls, path: Path) -> PromptVectors:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
        """
        with np.load(path) as file:
            digests, vectors = file["digests"], file["vectors"]
            known: dict[bytes, NDArray[np.float16] | None] = {
                bytes(digest): vector if vector.any() else None for digest, vector in zip(digests, vectors, strict=True)
            }
            return cls(known)

    def save(self, path: Path) -> None:
        nothing = np.zeros(SIZE, np.float16)
        np.savez(
            path,
            digests=np.array([np.frombuffer(digest, np.uint8) for digest in self._known]),
            vectors=np.array([nothing if vector is None else vector for vector in self._known.values()]),
        )

    def __contains__(self, text: str) -> bool:
        return _digest(text) in self._known

    def __len__(self) -> int:
        return len(self._known)

    def add(self, text: str, vector: Vector | None) -> None:
        self._known[_digest(text)] = None if vector is None else vector.astype(np.float16)

    def of(self, text: str) -> Vector | None:
        """The vector of a text; None where the embedder refuses it.

        Raises:
            KeyError: the text is not in the file.
        """
        vector = self._known[_digest(text)]
        return None if vector is None else vector.astype(np.float32)

    def asked(self, messages: Sequence[Message]) -> Vector | None:
        """The vector by which a conversation is judged; None: by its words. Raises as `of`."""
        text = asked(messages)
        return None if text is None else self.of(text)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:_DIGEST_BYTES]
