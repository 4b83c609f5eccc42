"""Writes safetensors folders: one file, or shards and their index where the tensors are large. numpy only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.loader.safetensors import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 4 << 30
_ALIGNMENT = 8  # of the first tensor's bytes
_DTYPES = {"float32": "F32", "float16": "F16", "int32": "I32", "uint8": "U8"}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it is to lie in the file: `dtype` is safetensors' name, `data` any array of so many bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any]


def stored(values: npt.NDArray[Any]) -> Stored:
    """A numpy array under its own type."""
    return Stored(_DTYPES[values.dtype.name], values.shape, values)


def write_folder(folder: Path, tensors: Mapping[str, Stored], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `tensors` into `folder`, which exists, in their order. Only a shard of one tensor exceeds `shard_bytes`."""
    shards: list[dict[str, Stored]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.data.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.data.nbytes
    if len(shards) == 1:
        _write(folder / SINGLE_FILE, shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.data.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write(path: Path, tensors: Mapping[str, Stored]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.data).data)
