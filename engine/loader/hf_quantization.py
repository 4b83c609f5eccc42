"""What config.json says of how weights are quantised, checked: what cannot be read right is refused here.

Methods: "awq" (gemm layout), "gptq" (both ways to store zeros, act-order), "fp8" (e4m3 per tensor, channel or block),
"compressed-tensors" (four-bit integers and e4m3), "mxfp4". Which modules are quantised is seen from their tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.loader.errors import ModelFileError

METHODS = ("awq", "gptq", "fp8", "compressed-tensors", "mxfp4")
_REMEDY = "Use another quantisation of this model, or the model itself"
_COMPRESSED_FORMATS = {"int": ("pack-quantized",), "float": ("float-quantized", "naive-quantized")}


@dataclass(frozen=True, slots=True)
class Quantization:
    """`method`: one of METHODS. `symmetric` and `checkpoint_format` say how GPTQ's zeros are stored; `block`: rows and
    columns that share an FP8 scale, None: as the scales' shape says. `bits`: of a weight."""

    method: str
    bits: int
    symmetric: bool = True
    checkpoint_format: str = "gptq"
    block: tuple[int, int] | None = None


def read_quantization(path: Path, config: Mapping[str, Any]) -> Quantization | None:
    """Of a parsed config.json at `path`; None: plain floats. Raises ModelFileError for a method not supported."""
    found, inner = config.get("quantization_config"), config.get("text_config")
    if found is None and isinstance(inner, Mapping):
        found = inner.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise ModelFileError(path, "quantization_config is no object", "Download config.json again")
    method = found.get("quant_method")
    if method not in METHODS:
        raise ModelFileError(path, f"quantisation {method!r} is not supported", f"Use one of {', '.join(METHODS)}")
    if method == "awq":
        _require(path, found, "bits", (4,))
        _require(path, found, "version", ("gemm", "GEMM"), default="gemm")
        _require(path, found, "zero_point", (True,), default=True)
        return Quantization("awq", 4)
    if method == "gptq":
        _require(path, found, "bits", (4,))
        form = found.get("checkpoint_format") or "gptq"
        if form not in ("gptq", "gptq_v2"):
            raise ModelFileError(path, f"GPTQ's checkpoint_format {form!r} is not supported", _REMEDY)
        return Quantization("gptq", 4, symmetric=bool(found.get("sym", True)), checkpoint_format=form)
    if method == "fp8":
        _require(path, found, "fmt", ("e4m3",), default="e4m3")
        return Quantization("fp8", 8, block=_block(path, found.get("weight_block_size")))
    if method == "mxfp4":
        return Quantization("mxfp4", 4)
    return _compressed(path, found)


def _compressed(path: Path, found: Mapping[str, Any]) -> Quantization:
    """compressed-tensors: all groups of modules must be stored in one supported way."""
    weights: list[Mapping[str, Any]] = []
    groups = found.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        scheme = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(scheme, Mapping):
            weights.append(scheme)
    kinds = {(str(scheme.get("type", "int")), str(scheme.get("num_bits"))) for scheme in weights}
    blocks = {tuple(scheme["block_structure"]) for scheme in weights if scheme.get("block_structure")}
    form = found.get("format")
    if len(kinds) != 1 or len(blocks) > 1 or not kinds <= {("int", "4"), ("float", "8")}:
        described = ", ".join(f"{kind} of {bits} bits" for kind, bits in sorted(kinds)) or "no scheme"
        raise ModelFileError(path, f"compressed-tensors with {described} is not supported", _REMEDY)
    ((kind, bits),) = kinds
    if form not in _COMPRESSED_FORMATS[kind]:
        raise ModelFileError(path, f"compressed-tensors' format {form!r} is not supported", _REMEDY)
    return Quantization("compressed-tensors", int(bits), block=_block(path, list(blocks.pop())) if blocks else None)


def _block(path: Path, value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(side) is int and side > 0 for side in value):
        raise ModelFileError(path, f"blocks of {value!r} share a scale: not two sizes", "Download config.json again")
    return value[0], value[1]


def _require(path: Path, found: Mapping[str, Any], key: str, allowed: tuple[Any, ...], default: Any = None) -> None:
    value = found.get(key, default)
    if value not in allowed:
        raise ModelFileError(
            path, f"{found['quant_method']} with {key} {value!r} is not supported: only {allowed[0]!r} is", _REMEDY
        )
