"""The weights of a Hugging Face folder by their usual names, whatever they are quantised with.

`tensor("model.layers.0.self_attn.q_proj.weight")` is that matrix, from `.weight` itself, from AWQ's or GPTQ's words, or
from eight- or four-bit floats with their scales. So who maps names to roles need not know of quantisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.loader.errors import ModelFileError
from engine.loader.hf_quantization import Quantization, read_quantization
from engine.loader.safetensors import Safetensors, TensorEntry
from engine.quant import fp8, words
from engine.quant.matrix import GROUP_SIZE, ORDERED, WeightMatrix

_ANEW = "The weights are damaged or of another version: download them again"
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class MatrixInfo:
    """A matrix as it will be once it is taken: see `WeightMatrix`."""

    name: str
    shape: tuple[int, ...]
    encoding: str


class HfWeights:
    """`files` read with what `config`, a parsed config.json, says of quantisation.

    Raises ModelFileError for a quantisation that is not supported.
    """

    def __init__(self, files: Safetensors, config: Mapping[str, Any]) -> None:
        self.files = files
        self.quantization = read_quantization(files.path / "config.json", config)

    def __contains__(self, name: str) -> bool:
        return self._stored_as(name) is not None

    def info(self, name: str) -> MatrixInfo:
        """Shape and encoding of the tensor `name`, from headers. Raises ModelFileError when it is missing or cannot be
        read."""
        base, shape_of = name.removesuffix(_WEIGHT), self.files.info
        match self._stored_as(name):
            case "qweight":
                qweight, rows = shape_of(f"{base}.qweight").shape, shape_of(f"{base}.scales").shape[-1]
                if self._method(name, "awq", "gptq") == "awq":
                    return MatrixInfo(name, (rows, qweight[0]), "AWQ")
                ordered = self._group_order(f"{base}.g_idx", f"{base}.scales", 0) is not None
                return MatrixInfo(name, (rows, 8 * qweight[0]), ORDERED if ordered else "GPTQ")
            case "weight_packed":
                rows, count = shape_of(f"{base}.weight_packed").shape
                ordered = self._group_order(f"{base}.weight_g_idx", f"{base}.weight_scale", 1) is not None
                return MatrixInfo(name, (rows, 8 * count), ORDERED if ordered else "GPTQ")
            case "blocks":
                blocks = shape_of(f"{name}_blocks").shape
                return MatrixInfo(name, (*blocks[:-2], blocks[-2] * GROUP_SIZE), "MXFP4")
            case _:
                entry = shape_of(name)  # which says so if there is none
                return MatrixInfo(name, entry.shape, entry.dtype)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> WeightMatrix:
        """The tensor `name` in its file's encoding, repacked where that loses nothing.

        Raises ModelFileError when it is missing, damaged, or, with `shape` given, has another shape.
        """
        info = self.info(name)
        if shape is not None and info.shape != shape:
            raise ModelFileError(
                self.files.path,
                f"tensor {name!r} has shape {list(info.shape)}, the configuration asks for {list(shape)}",
                "config.json and weights disagree: download both again",
            )
        base = name.removesuffix(_WEIGHT)
        try:
            match self._stored_as(name):
                case "qweight":
                    return self._awq(base, *info.shape) if info.encoding == "AWQ" else self._gptq(base, *info.shape)
                case "weight_packed":
                    return self._compressed(base, *info.shape)
                case "blocks":
                    self._method(name, "mxfp4")
                    blocks = self.files.array(f"{name}_blocks")
                    return fp8.from_mxfp4(blocks, self.files.array(f"{name}_scales", blocks.shape[:-1]))
                case "codes":
                    return self._fp8(name, base)
                case _:
                    return self.files.tensor(name)
        except ValueError as error:
            raise ModelFileError(self.files.path, f"tensor {name!r}: {error}", _ANEW) from error

    def expert(self, name: str, number: int, shape: tuple[int, int, int]) -> WeightMatrix:
        """Matrix `number` of the tensor `name` of `shape` `[experts, rows, columns]`, without reading the others.

        Raises ModelFileError as `tensor`, and IndexError for a number that is not there.
        """
        count, rows, columns = shape
        if not 0 <= number < count:
            raise IndexError(f"expert {number} of {count}")
        if self._stored_as(name) != "blocks":
            return self.tensor(name, shape).rows(number * rows, (number + 1) * rows)
        self._method(name, "mxfp4")
        sizes = (count, rows, columns // GROUP_SIZE)
        blocks = self.files.array(f"{name}_blocks", (*sizes, GROUP_SIZE // 2))
        return fp8.from_mxfp4(blocks[number], self.files.array(f"{name}_scales", sizes)[number])

    def vector(self, name: str, size: int) -> npt.NDArray[np.float32]:
        """The tensor `name` of one dimension, decoded. Raises ModelFileError as `tensor`."""
        return self.files.tensor(name, (size,)).dequantize()

    def _stored_as(self, name: str) -> str | None:
        """How the tensor is stored, by the names that are there: a suffix, "codes" for eight-bit floats, or None."""
        tensors, base = self.files.tensors, name.removesuffix(_WEIGHT)
        if name in tensors:
            return "codes" if tensors[name].dtype.startswith("F8") else "weight"
        if name.endswith(_WEIGHT):
            return next((kind for kind in ("qweight", "weight_packed") if f"{base}.{kind}" in tensors), None)
        return "blocks" if f"{name}_blocks" in tensors else None

    def _method(self, name: str, *expected: str) -> str:
        """The configured method, which must be one of `expected` for tensors stored like `name`."""
        method = self.quantization.method if self.quantization else None
        if method not in expected:
            raise ModelFileError(
                self.files.path,
                f"tensor {name!r} is stored as {' or '.join(expected)}, config.json says {method or 'nothing of that'}",
                "config.json needs the model's own quantization_config: download it again",
            )
        return method

    def _config(self) -> Quantization:
        assert self.quantization is not None  # asked for only after `_method`
        return self.quantization

    def _words(self, name: str, shape: tuple[int, ...]) -> words.Words:
        found: words.Words = self.files.array(name, shape)
        if found.dtype != np.int32:
            raise ValueError(f"{name} is of type {self.files.info(name).dtype}, not I32")
        return found

    def _scales(self, name: str) -> npt.NDArray[np.float32]:
        return self.files.tensor(name).dequantize()

    def _group_order(self, name: str, scales: str, axis: int) -> words.Words | None:
        if name not in self.files.tensors:
            return None
        try:
            return words.group_order(self.files.array(name), self.files.info(scales).shape[axis])
        except ValueError as error:
            raise ModelFileError(self.files.path, f"tensor {name!r}: {error}", _ANEW) from error

    def _awq(self, base: str, rows: int, columns: int) -> WeightMatrix:
        scales = self._grouped(self._scales(f"{base}.scales"), rows, columns)
        qweight = self._words(f"{base}.qweight", (columns, rows // 8))
        return words.from_awq(qweight, self._words(f"{base}.qzeros", (len(scales), rows // 8)), scales)

    def _gptq(self, base: str, rows: int, columns: int) -> WeightMatrix:
        scales = self._grouped(self._scales(f"{base}.scales"), rows, columns)
        qweight = self._words(f"{base}.qweight", (columns // 8, rows))
        qzeros = self._words(f"{base}.qzeros", (len(scales), rows // 8))
        g_idx = self._words(f"{base}.g_idx", (columns,)) if f"{base}.g_idx" in self.files.tensors else None
        return words.from_gptq(qweight, qzeros, scales, g_idx, zeros_less_one=self._zeros_less_one(qzeros))

    def _zeros_less_one(self, qzeros: words.Words) -> bool:
        """Whether zeros are stored less one, as version 1 does. Symmetric weights' zeros are all 8, so that 7 and 8
        tell the versions apart: some tools write version 2 and call it 1."""
        config = self._config()
        if config.symmetric:
            found = np.unique(words.unpack_words(qzeros))
            if found.tolist() in ([7], [8]):
                return bool(found[0] == 7)
        return config.checkpoint_format == "gptq"

    def _grouped(self, scales: npt.NDArray[np.float32], rows: int, columns: int) -> npt.NDArray[np.float32]:
        """Scales `[groups, rows]`, checked."""
        if scales.ndim != 2 or rows % 8 or columns % len(scales) or columns // len(scales) % GROUP_SIZE:
            raise ValueError(
                f"scales of shape {list(scales.shape)} for {rows} rows and {columns} columns: rows must be a multiple "
                f"of 8 and groups one of {GROUP_SIZE}"
            )
        return scales

    def _compressed(self, base: str, rows: int, columns: int) -> WeightMatrix:
        self._method(f"{base}{_WEIGHT}", "compressed-tensors")
        packed = self._words(f"{base}.weight_packed", (rows, columns // 8))
        scales = self._scales(f"{base}.weight_scale")
        self._grouped(scales.T, rows, columns)
        zeros = None
        if f"{base}.weight_zero_point" in self.files.tensors:
            zeros = self._words(f"{base}.weight_zero_point", (rows // 8, scales.shape[1]))
        g_idx = (
            self._words(f"{base}.weight_g_idx", (columns,)) if f"{base}.weight_g_idx" in self.files.tensors else None
        )
        return words.from_compressed(packed, scales, zeros, g_idx)

    def _fp8(self, name: str, base: str) -> WeightMatrix:
        self._method(name, "fp8", "compressed-tensors")
        codes = self._codes(self.files.info(name))
        rows, columns = codes.shape
        found = [scale for scale in (f"{name}_scale_inv", f"{name}_scale") if scale in self.files.tensors]
        if not found:
            raise ValueError("its scale is missing")
        entry = self.files.info(found[0])
        if entry.shape == ():
            scale = self.files.array(found[0]).astype(np.float32).reshape(1, 1)
        else:
            scale = self._scales(found[0])
        if scale.size == 1:
            return fp8.scaled_fp8(codes, scale.reshape(1, 1), (rows, columns))
        block = self._config().block or (1, columns)
        return fp8.scaled_fp8(codes, scale.reshape(len(scale), -1), block)

    def _codes(self, entry: TensorEntry) -> npt.NDArray[np.uint8]:
        if entry.dtype != "F8_E4M3" or len(entry.shape) != 2:
            raise ValueError(f"eight-bit floats of type {entry.dtype} and shape {list(entry.shape)} are not supported")
        return self.files.array(entry.name)
