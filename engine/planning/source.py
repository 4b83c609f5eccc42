"""What a plan is made for: a GGUF file, a folder, its config.json alone, or a public model by name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.loader.errors import ModelFileError
from engine.loader.families import GgufTensors
from engine.loader.folder_model import FolderModel
from engine.loader.gguf import GgufFile
from engine.loader.hf_config import read_hf_spec
from engine.loader.hf_quantization import Quantization, read_quantization
from engine.loader.safetensors import INDEX_FILE, SINGLE_FILE, Safetensors
from engine.memory import MatrixHeader
from engine.models.spec import ModelSpec
from engine.planning.headers import matrices_of, product_parameters
from engine.planning.shapes import SHAPES

# Bits per weight, scales (float16, or float32 for FP8's blocks) and zeros counted.
QUANTIZATIONS = ("int4", "fp8", "mxfp4")
_ENCODINGS = {"int4": "AWQ", "fp8": "F8_E4M3", "mxfp4": "MXFP4"}
_INT4_GROUP, _FP8_BLOCK = 128, 128 * 128
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class Source:
    """`stored_bytes`: of the weights by encoding; `matrices`: see `ModelTensors.matrices`. Both come from the files'
    headers where they are there, else from formulas."""

    name: str
    spec: ModelSpec
    stored_bytes: Mapping[str, int]
    matrices: Sequence[Sequence[MatrixHeader]]

    @classmethod
    def by_formula(cls, name: str, spec: ModelSpec, quantization: str | None, dtype: str = "bfloat16") -> Source:
        """As if the blocks' matrices were quantised so (MXFP4: the experts'), and everything else were of `dtype`."""
        stored = estimate(spec, dtype, quantization)
        encoding = "BF16" if quantization is None else _ENCODINGS[quantization]
        return cls(name, spec, stored, list(matrices_of(spec, encoding, experts_only=quantization == "mxfp4")))


def find_source(model: str, quantization: str | None = None) -> Source:
    """`model`: a path or a name of SHAPES. `quantization`: as if its matrices were stored so.

    Raises ModelFileError for a path that cannot be used, ValueError for a name that is not known.
    """
    path = Path(model)
    if model in SHAPES and not path.exists():
        return Source.by_formula(model, SHAPES[model], quantization)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return _from_config(path, quantization)
    if not path.exists():
        known = ", ".join(SHAPES)
        raise ValueError(f"{model!r} is neither a file nor a model that is known by name: {known}")
    file = GgufFile(path)
    tensors, stored = GgufTensors(file), Counter[str]()
    if quantization is not None:
        return Source.by_formula(path.stem, tensors.spec, quantization)
    for tensor in file.tensors.values():
        stored[tensor.encoding] += tensor.num_bytes
    return Source(path.stem, tensors.spec, stored, list(tensors.matrices()))


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


def _from_config(path: Path, quantization: str | None) -> Source:
    """A config.json, with the weights beside it or alone."""
    try:
        config: Any = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelFileError(path, f"cannot be read ({error})", "Give a model's config.json or its folder") from error
    if not isinstance(config, dict):
        raise ModelFileError(path, "no JSON object", "Give a model's config.json or its folder")
    spec, folder = read_hf_spec(path, config), path.parent
    if quantization is None and any((folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        stored: Counter[str] = Counter()
        for entry in Safetensors(folder).tensors.values():
            stored[entry.dtype] += entry.num_bytes
        return Source(folder.resolve().name, spec, stored, list(FolderModel(folder).tensors().matrices()))
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in _DTYPE_BYTES:
        raise ModelFileError(path, f"weights of type {dtype!r} are not supported", f"Use {', '.join(_DTYPE_BYTES)}")
    found = read_quantization(path, config)
    kind = quantization or (None if found is None else _kind(found))
    return Source.by_formula(folder.resolve().name, spec, kind, dtype)


def _kind(found: Quantization) -> str:
    if found.method == "mxfp4":
        return "mxfp4"
    return "int4" if found.bits == 4 else "fp8"
