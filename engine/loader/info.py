"""What a model file says about itself: enough for the HTTP side (names, tokenizer, template), no weights, no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from engine.loader.errors import ModelFileError
from engine.loader.families import read_spec
from engine.loader.gguf import GgufFile
from engine.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """A GGUF file's tokenizer. `types` are GGUF's: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte."""

    model: str  # "gpt2": byte-level BPE
    pre: str  # names the pre-tokenizer
    tokens: list[str]
    types: list[int]
    merges: list[str]
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    add_bos: bool


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model file without its weights."""

    path: Path
    name: str
    spec: ModelSpec
    quantization: str  # the encoding of most weights, e.g. "Q4_1"
    file_bytes: int
    tokenizer: TokenizerData
    chat_template: str | None


def read_info(path: Path | str) -> ModelInfo:
    """Read a model file's description. Raises ModelFileError for a file that cannot be served."""
    file = GgufFile(path)
    spec = read_spec(file)
    by_type: Counter[str] = Counter()
    for tensor in file.tensors.values():
        by_type[tensor.type.name] += tensor.num_bytes
    template = "tokenizer.chat_template"
    return ModelInfo(
        path=file.path,
        name=file.text("general.name", file.path.stem),
        spec=spec,
        quantization=by_type.most_common(1)[0][0],
        file_bytes=file.num_bytes,
        tokenizer=read_tokenizer(file, spec.vocab_size),
        chat_template=file.text(template) if template in file.metadata else None,
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

    def token_id(name: str) -> int | None:
        value = file.integer(key + name, -1)
        if value >= len(tokens):
            raise ModelFileError(file.path, f"{name} {value} is outside the vocabulary", "Convert the file anew")
        return value if value >= 0 else None

    model = file.text(key + "model")
    bos = token_id("bos_token_id")
    add_bos = file.metadata.get(key + "add_bos_token", model == "llama")
    return TokenizerData(
        model=model,
        pre=file.text(key + "pre", "default"),
        tokens=tokens,
        types=types,
        merges=[str(merge) for merge in file.array(key + "merges")] if key + "merges" in file.metadata else [],
        bos_id=bos,
        eos_id=token_id("eos_token_id"),
        eot_id=token_id("eot_token_id"),
        add_bos=bool(add_bos) and bos is not None,
    )
