"""The safetensors reader: the same tensors as the format's own library, and a clear refusal of every damage."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from engine.loader.errors import ModelFileError
from engine.loader.safetensors import INDEX_FILE, SINGLE_FILE, Safetensors


def assemble(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 32, generator=generator)
    return {
        "f32": values,
        "f16": values.half(),
        "bf16": values.bfloat16(),
        "vector": values[0].clone(),
        "experts": values.reshape(2, 3, 32).clone(),
        "i32": torch.arange(12, dtype=torch.int32).reshape(3, 4),
        "empty": torch.empty(2, 0),
        "scalar": torch.tensor(2.5),
        "f8": values.to(torch.float8_e4m3fn),
    }


def test_tensors_are_those_of_the_library(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    file = Safetensors(path)
    assert set(file.tensors) == set(tensors)
    assert file.num_bytes == path.stat().st_size
    for name in ("f32", "f16", "bf16", "vector", "experts"):
        got = file.tensor(name, tuple(tensors[name].shape))
        assert np.array_equal(got.dequantize(), tensors[name].float().numpy()), name
    assert np.array_equal(file.array("i32"), tensors["i32"].numpy())
    assert np.array_equal(file.array("f8"), tensors["f8"].view(torch.uint8).numpy())
    assert file.array("empty").shape == (2, 0)
    assert file.array("scalar") == 2.5
    assert not file.array("i32").flags.writeable


def test_tensors_at_odd_offsets(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    header = {"a": entry("U8", [3], 0, 3), "b": entry("F32", [1, 2], 3, 11)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(assemble(text, b"abc" + struct.pack("<2f", 1.5, -2.0)))
    assert Safetensors(path).tensor("b").dequantize().tolist() == [[1.5, -2.0]]


def test_a_folder_of_shards(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    folder = Safetensors(tmp_path)
    assert {name: found.shard.name for name, found in folder.tensors.items()} == weight_map
    for name in ("f32", "experts"):
        assert np.array_equal(folder.tensor(name).dequantize(), tensors[name].numpy())

    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"model-00002-of-00002.safetensors: no such file"):
        Safetensors(tmp_path)
    save_file({"other": tensors["f32"]}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelFileError, match="'vector' is missing, which"):
        Safetensors(tmp_path)


def test_a_folder_with_one_file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ModelFileError, match=f"neither {SINGLE_FILE}"):
        Safetensors(tmp_path)
    save_file(tensors, tmp_path / SINGLE_FILE)
    assert set(Safetensors(tmp_path).tensors) == set(tensors)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ({}, "no weight_map"),
        ({"weight_map": {"a": "../model.safetensors"}}, "no file of this folder"),
        ({"weight_map": {"a": 3}}, "no file of this folder"),
        ([], "no object"),
    ],
)
def test_refused_indexes(tmp_path: Path, index: object, problem: str) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=problem):
        Safetensors(tmp_path)


TWICE = b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": 1}'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "cannot be read"),
        (b"abc", "truncated"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "Git LFS pointer"),
        (struct.pack("<Q", 1 << 40), "truncated"),
        (assemble(b"{"), "JSON is damaged"),
        (assemble(b"[" * 100_000), "JSON is damaged"),
        (assemble(TWICE, b"x"), "appears twice"),
        (assemble([]), "no object"),
        (assemble({"a": 1}), "header of tensor 'a' is damaged"),
        (assemble({"a": entry("U8", [-1], 0, 1)}, b"x"), "header of tensor 'a' is damaged"),
        (assemble({"a": entry("U8", [True], 0, 1)}, b"x"), "header of tensor 'a' is damaged"),
        (assemble({"a": entry("F4", [2], 0, 1)}, b"x"), "unknown type 'F4'"),
        (assemble({"a": entry("F32", [2], 0, 4)}, b"1234"), "has 4 bytes, its shape asks for 8"),
        (assemble({"a": entry("U8", [2], 4, 2)}, b"1234"), "has -2 bytes"),
        (assemble({"a": entry("F32", [2], 0, 8)}, b"1234"), "truncated: tensor 'a'"),
        (assemble({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"123"), "'b' overlaps"),
        (assemble({"a": entry("U8", [2], 0, 2), "b": entry("U8", [1], 3, 4)}, b"1234"), "'b' leaves a gap"),
        (assemble({"a": entry("U8", [2], 0, 2)}, b"1234"), "2 bytes belong to no tensor"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=problem):
        Safetensors(path)


def test_what_is_asked_for_is_checked(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(tensors, path)
    file = Safetensors(path)
    with pytest.raises(ModelFileError, match="'absent' is missing"):
        file.tensor("absent")
    with pytest.raises(ModelFileError, match=r"shape \[6, 32\], the configuration asks for \[32, 6\]"):
        file.tensor("f32", (32, 6))
    with pytest.raises(ModelFileError, match="of type I32, not F32"):
        file.tensor("i32")
    for name in ("empty", "scalar"):
        with pytest.raises(ModelFileError, match="has no rows"):
            file.tensor(name)


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 400), value=st.integers(0, 255), length=st.integers(0, 400))
def test_no_damage_does_more_than_raise(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int, length: int
) -> None:
    content = bytearray(save({"a": torch.arange(8, dtype=torch.float32), "b": torch.ones(2, 3)}))
    content[at % len(content)] = value
    path = tmp_path_factory.mktemp("damage") / "w.safetensors"
    path.write_bytes(content[: max(1, len(content) - length % 3 * length)])
    try:
        file = Safetensors(path)
    except ModelFileError:
        return
    for name in file.tensors:
        assert file.array(name).nbytes == file.info(name).num_bytes
