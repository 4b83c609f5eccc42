"""The one door to a model: a GGUF file, or a folder as Hugging Face lays it out.

Everything that serves, measures or describes a model asks `open_model` and need not know which of the two it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from engine.loader.info import ModelInfo
from engine.memory import MatrixHeader
from engine.models.spec import ModelSpec
from engine.models.tensors import FloatArray, LayerTensors, TensorSource


class ModelTensors(TensorSource, Protocol):
    """The weights by their role, and what their headers say before they are read."""

    def layer(self, index: int) -> LayerTensors:
        """Block `index` alone."""
        ...

    def matrices(self, *, output: bool = True) -> Iterator[Sequence[MatrixHeader]]:
        """The matrices that products are made of; those of a list share one product. Last, if wanted, `output`."""
        ...

    def score(self, labels: int) -> FloatArray:
        """The head `[labels, hidden]` of a model that scores. Raises ModelFileError where there is none."""
        ...


class OpenModel(ABC):
    """A model whose headers are read and whose weights are mapped, none of them touched yet."""

    path: Path
    spec: ModelSpec

    @property
    @abstractmethod
    def info(self) -> ModelInfo:
        """Names, tokenizer, template and defaults. Raises ModelFileError where one of them cannot be used."""

    @abstractmethod
    def tensors(self) -> ModelTensors:
        """The weights. Raises ModelFileError where one is missing, when it is taken."""

    @abstractmethod
    def digest(self) -> bytes:
        """What tells this model from others, see `engine.loader.digest`."""


def open_model(path: Path | str) -> OpenModel:
    """Open the model at `path`. Raises ModelFileError for one that is incomplete or cannot be served."""
    if Path(path).is_dir():
        from engine.loader.folder_model import FolderModel

        return FolderModel(path)
    from engine.loader.gguf_model import GgufModel

    return GgufModel(path)


def read_info(path: Path | str) -> ModelInfo:
    """The description of the model at `path`. Raises ModelFileError as `open_model`."""
    return open_model(path).info
