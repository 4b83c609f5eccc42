"""A prepared ONNX model, run by ONNX Runtime: no PyTorch, a tenth of the memory, several times the speed.

`prepare.py` builds and checks the files that are loaded here. Each start compares a few vectors with those of the day
it was built, for it may be another machine's turn now.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tokenizers import Tokenizer

from cache.embedding.folder import Description, EmbedderError
from cache.embedding.probes import PROBES

Vectors = NDArray[np.float32]

MODEL, VECTORS, ABOUT = "model.onnx", "probes.npy", "about.json"
_CHECKED_PROBES = 8
_LEAST_COSINE = 0.999
_MOST_PADDING = 1.25  # tokens of a run, as a multiple of those that count


class About(msgspec.Struct, frozen=True):
    """What is known of a prepared model: the digest of its file, and how far it is from PyTorch's vectors.

    `cosine_shift` is the most by which the cosine of two probes differs.
    """

    backend: str
    sha256: str
    least_cosine: float
    mean_cosine: float
    cosine_shift: float


class OnnxEncoder:
    """A session and its tokenizer. `token_ids` and `encode` may run in two threads.

    Attributes:
        dimension: length of a vector.
        max_tokens: window of the model, special tokens included.
        unknown_id: of the token for what the tokenizer does not know.
    """

    def __init__(self, model: Description, graph: Path | bytes, *, threads: int) -> None:
        self._tokenizer = tokenizer(model)
        self._session = session(graph, threads=threads)
        self.dimension = model.hidden_size
        self.max_tokens = model.window
        self.unknown_id: int | None = None if model.unknown is None else self._tokenizer.token_to_id(model.unknown)

    @classmethod
    def prepared(cls, model: Description, folder: Path, *, threads: int) -> OnnxEncoder:
        """Load what `prepare` wrote.

        Raises:
            EmbedderError: a file is missing or damaged, or this machine computes other vectors from it.
        """
        try:
            about = msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)
            with (folder / MODEL).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            wanted = np.load(folder / VECTORS, allow_pickle=False)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise EmbedderError(f"{folder} holds no prepared model: {error}") from error
        if digest != about.sha256:
            raise EmbedderError(f"{folder / MODEL} is damaged: delete the folder, it is made anew.")
        encoder = cls(model, folder / MODEL, threads=threads)
        found = encoder.encode(list(PROBES[:_CHECKED_PROBES]))
        least = float((found * wanted[:_CHECKED_PROBES]).sum(axis=1).min())
        if not least >= _LEAST_COSINE:
            raise EmbedderError(
                f"{folder / MODEL} gives other vectors on this machine than where it was made (cosine {least:.4f}): "
                "set cache.embedder_backend to onnx or torch."
            )
        return encoder

    def token_ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def encode(self, texts: list[str]) -> Vectors:
        """Unit vectors, [len(texts), dimension]. A text has the same vector alone as in any company."""
        rows = [self.token_ids(text) for text in texts]
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        for run in _alike(rows):
            longest = len(rows[run[-1]])
            ids = np.zeros((len(run), longest), dtype=np.int64)  # [texts, tokens]
            mask = np.zeros_like(ids)
            for row, place in enumerate(run):
                ids[row, : len(rows[place])] = rows[place]
                mask[row, : len(rows[place])] = 1
            vectors[run] = self._session.run(["embedding"], {"input_ids": ids, "attention_mask": mask})[0]
        return vectors


def session(graph: Path | bytes, *, threads: int) -> onnxruntime.InferenceSession:
    """A session whose threads sleep while they wait: spinning would starve the gateway beside it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(
        graph if isinstance(graph, bytes) else str(graph), options, providers=["CPUExecutionProvider"]
    )


def tokenizer(model: Description) -> Tokenizer:
    """The model's tokenizer without the truncation and padding that its file may ask for."""
    try:
        found = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception
        raise EmbedderError(f"{model.folder / 'tokenizer.json'} cannot be read: {error}") from error
    found.no_truncation()
    found.no_padding()
    return found


def _alike(rows: list[list[int]]) -> Iterator[list[int]]:
    """Positions of the rows in runs of like length, shortest first: a run costs as much as its longest row."""
    run: list[int] = []
    tokens = 0
    for place in sorted(range(len(rows)), key=lambda place: len(rows[place])):
        length = len(rows[place])
        if run and length * (len(run) + 1) > _MOST_PADDING * (tokens + length):
            yield run
            run, tokens = [], 0
        run.append(place)
        tokens += length
    if run:
        yield run
