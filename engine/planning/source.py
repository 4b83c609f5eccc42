"""What a plan is made for: a GGUF file, a folder, its config.json alone, or a public model by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.loader.families import read_spec
from engine.loader.gguf import GgufFile
from engine.models.spec import ModelSpec
from engine.planning.ledger import product_parameters
from engine.planning.shapes import SHAPES

# Bits per weight, scales (float16, or float32 for FP8's blocks) and zeros counted.
QUANTIZATIONS = ("int4", "fp8", "mxfp4")
_INT4_GROUP, _FP8_BLOCK = 128, 128 * 128
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class Source:
    """`stored_bytes`: of the weights by encoding; from the files' headers where they are there, else by formula."""

    name: str
    spec: ModelSpec
    stored_bytes: Mapping[str, int]


def find_source(model: str, quantization: str | None = None) -> Source:
    """`model`: a path or a name of SHAPES. `quantization`: as if its matrices were stored so.

    Raises ModelFileError for a path that cannot be used, ValueError for a name that is not known.
    """
    path = Path(model)
    if model in SHAPES and not path.exists():
        spec = SHAPES[model]
        return Source(model, spec, estimate(spec, "bfloat16", quantization))
    if not path.exists():
        known = ", ".join(SHAPES)
        raise ValueError(f"{model!r} is neither a file nor a model that is known by name: {known}")
    file = GgufFile(path)
    spec, stored = read_spec(file), Counter[str]()
    for tensor in file.tensors.values():
        stored[tensor.encoding] += tensor.num_bytes
    return Source(path.stem, spec, estimate(spec, "bfloat16", quantization) if quantization else stored)


def estimate(spec: ModelSpec, dtype: str, quantization: str | None) -> dict[str, int]:
    """Bytes by encoding: the blocks' matrices quantised (MXFP4: the experts'), everything else in `dtype`."""
    if quantization is None:
        return {_NAMES[dtype]: spec.num_parameters * _DTYPE_BYTES[dtype]}
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization {quantization!r} is none of {', '.join(QUANTIZATIONS)}")
    quantised = product_parameters(spec, experts_only=quantization == "mxfp4")
    size = {
        "int4": quantised // 2 + quantised // _INT4_GROUP * 5 // 2,
        "fp8": quantised + quantised // _FP8_BLOCK * 4,
        "mxfp4": quantised // 2 + quantised // 32,
    }[quantization]
    return {quantization: size, _NAMES[dtype]: (spec.num_parameters - quantised) * _DTYPE_BYTES[dtype]}
