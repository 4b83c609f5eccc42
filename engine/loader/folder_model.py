"""A Hugging Face folder as a model: config.json, safetensors (sharded or not), tokenizer, templates and defaults."""

from __future__ import annotations

import re
from collections import Counter
from functools import cached_property
from pathlib import Path

from engine.loader.digest import content_digest
from engine.loader.errors import ModelFileError
from engine.loader.folder import Folder
from engine.loader.hf_config import read_family, read_hf_spec
from engine.loader.hf_pooling import read_pooling
from engine.loader.hf_quantization import read_quantization
from engine.loader.hf_tensors import HfTensors
from engine.loader.hf_tokenizer import TOKENIZER, read_generation, read_templates, read_tokenizer
from engine.loader.hf_weights import HfWeights
from engine.loader.info import ModelInfo
from engine.loader.safetensors import Safetensors
from engine.loader.source import OpenModel

_CONFIG = "config.json"
_CARD = "README.md"
_LICENCE = re.compile(r"^license:\s*(\S[^\n]*)$", re.MULTILINE)


class FolderModel(OpenModel):
    """One folder. Raises ModelFileError where a file is missing, damaged or asks for what is not supported."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._folder = Folder(path)
        self._config = self._folder.parse(_CONFIG, self._folder.need(_CONFIG, "the shape of the model"))
        self._family = read_family(self.path / _CONFIG, self._config)
        self.spec = read_hf_spec(self.path / _CONFIG, self._config)
        self._files = Safetensors(self.path)

    @cached_property
    def info(self) -> ModelInfo:
        """See `OpenModel.info`."""
        template, tool_template = read_templates(self._folder)
        return ModelInfo(
            path=self.path,
            name=self.path.resolve().name,
            spec=self.spec,
            quantization=self._quantization(),
            file_bytes=self._files.num_bytes,
            tokenizer=read_tokenizer(self._folder, self._config, self.spec.vocab_size),
            chat_template=template,
            tool_template=tool_template,
            generation=read_generation(self._folder),
            licence=self._licence(),
            pooling=read_pooling(self._folder, self._config),
        )

    def tensors(self) -> HfTensors:
        """See `OpenModel.tensors`."""
        return HfTensors(self.spec, self._family, HfWeights(self._files, self._config))

    def digest(self) -> bytes:
        """See `OpenModel.digest`."""
        headers = [text.encode() for name in (_CONFIG, TOKENIZER) if (text := self._folder.text(name)) is not None]
        entries = sorted(self._files.tensors.values(), key=lambda entry: entry.name)
        headers += [f"{entry.name} {entry.dtype} {entry.shape}".encode() for entry in entries]
        return content_digest(headers, [(entry.shard, entry.offset, entry.num_bytes) for entry in entries])

    def _quantization(self) -> str:
        if (found := read_quantization(self.path / _CONFIG, self._config)) is not None:
            return found.method
        by_type: Counter[str] = Counter()
        for entry in self._files.tensors.values():
            by_type[entry.dtype] += entry.num_bytes
        if not by_type:
            raise ModelFileError(self.path, "its safetensors files hold no tensor", "Copy the folder anew")
        return by_type.most_common(1)[0][0]

    def _licence(self) -> str | None:
        """As the head of the model card says it."""
        head, _, _ = (self._folder.text(_CARD) or "").removeprefix("---").partition("\n---")
        found = _LICENCE.search(head)
        return found[1].strip().strip("\"'") if found else None
