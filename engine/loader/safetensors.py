"""Reads safetensors files, one or a sharded set: memory-mapped tensors, every length checked against the files.

Format: 8 bytes of header length, a JSON header `{name: {dtype, shape, data_offsets}}`, then the tensors' bytes without
gaps or overlaps. A directory has `model.safetensors`, or shards and `model.safetensors.index.json`, whose `weight_map`
says which shard holds which tensor. Imports no torch.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from engine.loader.errors import ModelFileError
from engine.quant.blocks import BlockTensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100_000_000  # as the format's own library
_REDOWNLOAD = "Download the file again and compare its checksum"
_ANEW = "Save or convert the model anew"
# How numpy holds each type; eight-bit floats and bfloat16, which numpy lacks, as their bits.
_DTYPES = {
    "BOOL": "u1", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
    "U16": "<u2", "I16": "<i2", "F16": "<f2", "BF16": "<u2",
    "U32": "<u4", "I32": "<i4", "F32": "<f4",
    "U64": "<u8", "I64": "<i8", "F64": "<f8",
}  # fmt: skip
_FLOATS = {
    "F32": GGMLQuantizationType.F32,
    "F16": GGMLQuantizationType.F16,
    "BF16": GGMLQuantizationType.BF16,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: `offset` bytes from the start of the file `shard`. `dtype` is safetensors' name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard: Path
    offset: int
    num_bytes: int

    @property
    def encoding(self) -> str:
        return self.dtype


class Safetensors:
    """The tensors of a file or a directory. They are views of mapped files: nothing is copied until asked for.

    Raises ModelFileError for anything truncated, inconsistent or missing.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.tensors: dict[str, TensorEntry] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        if not self.path.is_dir():
            self.tensors.update(self._open(self.path))
        elif (index := self.path / INDEX_FILE).exists():
            self._open_shards(index)
        elif (single := self.path / SINGLE_FILE).exists():
            self.tensors.update(self._open(single))
        else:
            raise ModelFileError(
                self.path, f"has neither {SINGLE_FILE} nor {INDEX_FILE}", "Give a complete model folder"
            )

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(len(mapped) for mapped in self._maps.values())

    def info(self, name: str) -> TensorEntry:
        """Where the tensor `name` lies. Raises ModelFileError when it is missing."""
        entry = self.tensors.get(name)
        if entry is None:
            raise ModelFileError(self.path, f"tensor {name!r} is missing", "The model is incomplete: download it again")
        return entry

    def array(self, name: str, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        """The tensor `name` as a read-only array; bfloat16 as uint16 and eight-bit floats as uint8, their bits.

        Raises ModelFileError when it is missing or, with `shape` given, has another shape.
        """
        entry = self.info(name)
        if shape is not None and entry.shape != shape:
            raise ModelFileError(
                entry.shard,
                f"tensor {name!r} has shape {list(entry.shape)}, the configuration asks for {list(shape)}",
                "config.json and weights disagree: download both again",
            )
        dtype = np.dtype(_DTYPES[entry.dtype])
        if not entry.num_bytes:
            return np.empty(entry.shape, dtype)
        flat = np.frombuffer(self._maps[entry.shard], dtype, prod(entry.shape), entry.offset)
        return flat.reshape(entry.shape)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> BlockTensor:
        """The float tensor `name`, still in the file's type. Raises ModelFileError as `array`, and for other types."""
        entry = self.info(name)
        kind = _FLOATS.get(entry.dtype)
        if kind is None:
            raise ModelFileError(
                entry.shard,
                f"tensor {name!r} is of type {entry.dtype}, not {', '.join(_FLOATS)}",
                "Use a model whose weights are stored in a supported format",
            )
        values = self.array(name, shape)
        if values.ndim < 1 or not values.size:
            raise ModelFileError(entry.shard, f"tensor {name!r} of shape {list(entry.shape)} has no rows", _ANEW)
        rows = prod(entry.shape[:-1])
        return BlockTensor(_bytes(values).reshape(rows, -1), kind, entry.shape)

    def _open_shards(self, index: Path) -> None:
        content = _json_object(index, _read(index))
        weight_map = content.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFileError(index, "has no weight_map", _REDOWNLOAD)
        shards: dict[str, dict[str, TensorEntry]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelFileError(index, f"tensor {name!r} lies in {file!r}, which is no file of this folder", _ANEW)
            if file not in shards:
                shards[file] = self._open(index.parent / file)
            if name not in shards[file]:
                raise ModelFileError(
                    index.parent / file, f"tensor {name!r} is missing, which {index.name} says is here", _REDOWNLOAD
                )
            self.tensors[name] = shards[file][name]

    def _open(self, path: Path) -> dict[str, TensorEntry]:
        mapped = self._maps[path] = _map(path)
        if mapped[:8] == b"version ":
            raise ModelFileError(path, "a Git LFS pointer, not the weights", "Fetch them with `git lfs pull`")
        length = int.from_bytes(mapped[:8], "little")
        if len(mapped) < 8 or length > min(_MAX_HEADER_BYTES, len(mapped) - 8):
            raise ModelFileError(
                path, f"truncated, or no safetensors file: a header of {length} bytes in {len(mapped)}", _REDOWNLOAD
            )
        base = 8 + length
        header = _json_object(path, mapped[8:base])
        header.pop("__metadata__", None)
        entries = {name: _entry(path, name, value, base) for name, value in header.items()}
        _check_layout(path, entries, base, len(mapped))
        return entries


def _bytes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return values.reshape(-1).view(np.uint8)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelFileError(path, "no such file", "Check the path, or download what is missing") from error
    except (OSError, ValueError) as error:  # ValueError: mmap refuses an empty file
        raise ModelFileError(path, f"cannot be read ({error})", "Check the file and its permissions") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelFileError(path, f"cannot be read ({error})", "Check the file and its permissions") from error


def _json_object(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            raise ValueError("a name appears twice")
        return content

    try:
        content = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"its JSON is damaged ({error})", _REDOWNLOAD) from error
    if not isinstance(content, dict):
        raise ModelFileError(path, "its JSON is no object", _REDOWNLOAD)
    return content


def _entry(path: Path, name: str, value: object, base: int) -> TensorEntry:
    fields: Mapping[str, Any] = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise ModelFileError(path, f"the header of tensor {name!r} is damaged: {value!r:.200}", _REDOWNLOAD)
    if dtype not in _DTYPES:
        raise ModelFileError(
            path, f"tensor {name!r} has unknown type {dtype!r}", "Use a newer Tierline or another model"
        )
    start, end = offsets
    expected = prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
    if end - start != expected:
        raise ModelFileError(
            path, f"tensor {name!r} has {end - start} bytes, its shape asks for {expected}", _REDOWNLOAD
        )
    return TensorEntry(name, tuple(shape), dtype, path, base + start, expected)


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _check_layout(path: Path, entries: Mapping[str, TensorEntry], base: int, file_bytes: int) -> None:
    """The tensors fill the file from `base` on, one after the other."""
    position = base
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset + entry.num_bytes > file_bytes:
            raise ModelFileError(
                path,
                f"truncated: tensor {entry.name!r} ends at byte {entry.offset + entry.num_bytes}, "
                f"the file after {file_bytes}",
                _REDOWNLOAD,
            )
        if entry.offset != position:
            fault = "overlaps the one before it" if entry.offset < position else "leaves a gap before it"
            raise ModelFileError(path, f"tensor {entry.name!r} {fault}", _ANEW)
        position += entry.num_bytes
    if position != file_bytes:
        raise ModelFileError(path, f"{file_bytes - position} bytes belong to no tensor", _ANEW)
