"""A GGUF file as a model: its description, tokenizer and defaults from the metadata, its weights by role."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from pathlib import Path

from engine.loader.digest import content_digest
from engine.loader.errors import ModelFileError
from engine.loader.families import GgufTensors, read_spec
from engine.loader.gguf import GgufFile
from engine.loader.info import GenerationDefaults, ModelInfo, TokenizerData
from engine.loader.source import OpenModel
from engine.models.pooling import PoolingKind, PoolingSpec

_TEMPLATE = "tokenizer.chat_template"
_SAMPLING = "general.sampling."
_POOLING = {1: PoolingKind.MEAN, 2: PoolingKind.CLS, 3: PoolingKind.LAST}
# Pre-tokenizers of Llama 3's vocabulary; older files of it do not say that a text begins with BOS.
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")


class GgufModel(OpenModel):
    """One file. Raises ModelFileError for a file that is no complete GGUF file or of a family not known."""

    def __init__(self, path: Path | str) -> None:
        self.file = GgufFile(path)
        self.path = self.file.path
        self.spec = read_spec(self.file)

    @cached_property
    def info(self) -> ModelInfo:
        """See `OpenModel.info`."""
        file = self.file
        by_type: Counter[str] = Counter()
        for tensor in file.tensors.values():
            by_type[tensor.type.name] += tensor.num_bytes
        return ModelInfo(
            path=file.path,
            name=file.text("general.name", file.path.stem),
            spec=self.spec,
            quantization=by_type.most_common(1)[0][0],
            file_bytes=file.num_bytes,
            tokenizer=read_tokenizer(file, self.spec.vocab_size),
            chat_template=_text(file, _TEMPLATE),
            tool_template=_text(file, f"{_TEMPLATE}.tool_use"),
            generation=_generation(file),
            licence=_text(file, "general.license"),
            pooling=_pooling(file),
        )

    def tensors(self) -> GgufTensors:
        """See `OpenModel.tensors`."""
        return GgufTensors(self.file)

    def digest(self) -> bytes:
        """See `OpenModel.digest`."""
        tensors = self.file.tensors.values()
        data = min((tensor.offset for tensor in tensors), default=self.file.num_bytes)
        extents = [(self.path, tensor.offset, tensor.num_bytes) for tensor in tensors]
        with self.path.open("rb") as file:
            return content_digest([self.file.num_bytes.to_bytes(8, "little"), file.read(data)], extents)


def _pooling(file: GgufFile) -> PoolingSpec | None:
    number = file.integer(f"{file.text('general.architecture')}.pooling_type", 0)
    if number == 0:
        return None
    if number not in _POOLING:
        raise ModelFileError(
            file.path, f"pooling_type {number} is not supported", "Use a rerank model's Hugging Face folder instead"
        )
    return PoolingSpec(_POOLING[number])


def _text(file: GgufFile, key: str) -> str | None:
    return file.text(key) if key in file.metadata else None


def _generation(file: GgufFile) -> GenerationDefaults:
    def number(name: str) -> float | None:
        return file.number(_SAMPLING + name) if _SAMPLING + name in file.metadata else None

    top_k = number("top_k")
    return GenerationDefaults(
        temperature=number("temp"),
        top_p=number("top_p"),
        top_k=None if top_k is None else int(top_k),
        min_p=number("min_p"),
        repetition_penalty=number("penalty_repeat"),
    )


def read_tokenizer(file: GgufFile, vocab_size: int) -> TokenizerData:
    """The file's tokenizer, checked for the sizes and ids that the rest relies on."""
    key = "tokenizer.ggml."
    tokens = [str(token) for token in file.array(key + "tokens")]
    types = [int(kind) for kind in file.array(key + "token_type")]
    if len(tokens) != len(types) or len(tokens) > vocab_size:
        raise ModelFileError(
            file.path,
            f"{len(tokens)} tokens, {len(types)} token types and a vocabulary of {vocab_size} do not fit together",
            "Convert the file anew",
        )
    model, pre = file.text(key + "model"), file.text(key + "pre", "default")
    sentencepiece = model == "llama"
    scores = [float(score) for score in file.array(key + "scores")] if sentencepiece else []
    if sentencepiece and len(scores) != len(tokens):
        raise ModelFileError(file.path, f"{len(scores)} scores for {len(tokens)} tokens", "Convert the file anew")

    def token_id(name: str) -> int | None:
        value = file.integer(key + name, -1)
        if value >= len(tokens):
            raise ModelFileError(file.path, f"{name} {value} is outside the vocabulary", "Convert the file anew")
        return value if value >= 0 else None

    def flag(name: str, default: bool) -> bool:
        return bool(file.metadata.get(key + name, default))

    bos, eos = token_id("bos_token_id"), token_id("eos_token_id")
    return TokenizerData(
        model=model,
        pre=pre,
        tokens=tokens,
        types=types,
        merges=[str(merge) for merge in file.array(key + "merges")] if key + "merges" in file.metadata else [],
        bos_id=bos,
        eos_id=eos,
        eot_id=token_id("eot_token_id"),
        add_bos=flag("add_bos_token", sentencepiece or pre in _LLAMA3) and bos is not None,
        add_eos=flag("add_eos_token", False) and eos is not None,
        scores=scores,
        space_prefix=sentencepiece and flag("add_space_prefix", True),
        # The files do not say so, but Phi-3's control tokens are trained that way.
        strip_after_control=sentencepiece and file.text("general.architecture") == "phi3",
    )
