"""The GGUF reader: what the gguf package reads, and clear errors for files that cannot be served."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.loader import ModelFileError, read_info
from engine.loader.families import GgufTensors, undo_permutation
from engine.loader.gguf import GgufFile
from tests.engine.models import permute, write_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_model(path)
    return path


def test_reads_what_the_gguf_package_reads(smollm2_path: Path) -> None:
    reference, ours = gguf.GGUFReader(smollm2_path), GgufFile(smollm2_path)
    keys = [key for key in reference.fields if not key.startswith("GGUF.")]
    assert list(ours.metadata) == keys
    for key in keys:
        assert ours.metadata[key] == reference.fields[key].contents(), key
    assert list(ours.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(tensor.shape.tolist()[::-1])
        assert info.type == tensor.tensor_type
        assert np.array_equal(ours.tensor(tensor.name).data.ravel(), tensor.data.view(np.uint8).ravel()), tensor.name


def test_info_describes_the_model(smollm2_path: Path) -> None:
    info = read_info(smollm2_path)
    assert (info.spec.num_layers, info.spec.hidden_size, info.spec.num_kv_heads, info.spec.head_dim) == (30, 576, 3, 64)
    assert info.spec.num_parameters == 134_515_008
    assert info.quantization == "Q4_1"
    assert info.spec.tied_embeddings
    assert info.chat_template is not None
    assert "<|im_start|>" in info.chat_template
    assert not info.tokenizer.add_bos


def test_reading_a_description_imports_no_torch(tiny: Path) -> None:
    import subprocess

    code = (
        f"import sys; from engine.loader import read_info; read_info({str(tiny)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_permutation_is_undone() -> None:
    rows = np.arange(4 * 16)[:, None].repeat(3, axis=1)
    assert np.array_equal(permute(rows, 4)[undo_permutation(4, 16)], rows)


def test_every_truncation_is_an_error(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    cut = tmp_path / "cut.gguf"
    # Densely in the header, then at spread places up to the last byte.
    for length in [*range(1, 1500, 7), *range(1500, len(whole), len(whole) // 40), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelFileError, match=r"truncated|not a GGUF file"):
            GgufFile(cut)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04 not a model at all", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QcI", 1, b"k", 77), "unknown value type 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QcIIQ", 1, b"k", 9, 4, 1 << 61), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + struct.pack("<QcIB", 1, b"k", 0, 5) * 2, "appears twice"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<QcI", 1, b"t", 9), "9 dimensions"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<QcIQIQ", 1, b"t", 1, 0, 0, 0), "blocks"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<QcIQIQ", 1, b"t", 1, 33, 2, 0), "blocks of 32"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<QcIQIQ", 1, b"t", 1, 32, 999, 0), "unknown type 999"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<QcIQIQ", 1, b"t", 1, 32, 2, 8) + bytes(99),
            "alignment 32",
        ),
    ],
)
def test_malformed_files_name_the_fault(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=message) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        GgufFile(tmp_path / "absent.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ({"llama.rope.scaling.type": "spiral"}, "rope scaling 'spiral'"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.original_context_length' is missing"),
        ({"llama.expert_count": 8}, "expert_used_count' is missing"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 9}, "no mixture of experts"),
        ({"llama.attention.value_length": 64}, "different length"),
        ({"llama.attention.head_count_kv": 4}, "cannot share"),
        ({"llama.attention.head_count": 0}, "0 attention heads"),
        ({"llama.block_count": "two"}, "not an integer"),
        ({"llama.block_count": 2**62}, "layers are declared; a model has 1 to 10000"),
        ({"llama.vocab_size": 2**62}, "a vocabulary of"),
        ({"tokenizer.ggml.eos_token_id": 99_999}, "outside the vocabulary"),
    ],
)
def test_unsupported_features_are_refused(tiny: Path, metadata: dict[str, int | str], message: str) -> None:
    file = GgufFile(tiny)
    file.metadata.update(metadata)
    from engine.loader.families import read_spec
    from engine.loader.gguf_model import read_tokenizer

    with pytest.raises(ModelFileError, match=message):
        read_tokenizer(file, read_spec(file).vocab_size)


def test_missing_and_misshapen_tensors(tmp_path: Path, tiny: Path) -> None:
    path = tmp_path / "incomplete.gguf"
    write_model(path, leave_out=["blk.1.ffn_up.weight"])
    with pytest.raises(ModelFileError, match=r"'blk\.1\.ffn_up\.weight' is missing"):
        list(GgufTensors(GgufFile(path)).layers())
    file = GgufFile(tiny)
    file.metadata["llama.feed_forward_length"] = 192
    with pytest.raises(ModelFileError, match="the metadata asks for"):
        list(GgufTensors(file).layers())
