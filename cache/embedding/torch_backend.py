"""Any model that sentence-transformers can load, run by PyTorch: what the ONNX backends are measured against."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.embedding.folder import EmbedderError

Vectors = NDArray[np.float32]


class TorchEncoder:
    """A loaded model; texts of one call are padded to the longest.

    Attributes:
        dimension: length of a vector.
        max_tokens: window of the model, special tokens included.
        unknown_id: of the token for what the tokenizer does not know.
    """

    def __init__(self, folder: Path, name: str, *, threads: int) -> None:
        """Raises EmbedderError when the folder holds no such model."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        offline = os.environ.get("HF_HUB_OFFLINE")
        os.environ["HF_HUB_OFFLINE"] = "1"  # everything is in the folder: ask nobody
        try:
            import torch
            from sentence_transformers import SentenceTransformer
            from transformers.utils import logging

            torch.set_num_threads(threads)
            logging.disable_progress_bar()
            self._model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise EmbedderError(f"'{name}' ({folder}) is not a sentence-transformers model: {error}") from error
        finally:
            if offline is None:
                del os.environ["HF_HUB_OFFLINE"]
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
        """Unit vectors, [len(texts), dimension]."""
        vectors = self._model.encode(
            texts,
            batch_size=len(texts),
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return np.ascontiguousarray(vectors, dtype=np.float32)
