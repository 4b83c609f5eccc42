"""The one door to a model: what it says of a file or a folder, and what tells models apart."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from engine.loader import GenerationDefaults, ModelFileError, open_model, read_info
from tests.engine.models import write_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_model(path)
    return path


def test_a_gguf_file_says_what_it_is(smollm2_path: Path) -> None:
    info = read_info(smollm2_path)
    assert (info.format, info.quantization, info.spec.architecture) == ("gguf", "Q4_1", "llama")
    assert info.licence == "apache-2.0"
    assert info.file_bytes == smollm2_path.stat().st_size
    assert info.generation == GenerationDefaults()


def test_recommended_sampling_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, metadata={"general.sampling.top_k": 7})
    assert read_info(path).generation == GenerationDefaults(top_k=7)


def test_a_copy_has_the_same_digest_and_a_change_of_any_tensor_another(tiny: Path, tmp_path: Path) -> None:
    original = open_model(tiny).digest()
    copy = tmp_path / "renamed.gguf"
    copy.write_bytes(tiny.read_bytes())
    assert open_model(copy).digest() == original
    content = bytearray(tiny.read_bytes())
    tensors = gguf.GGUFReader(tiny).tensors
    for tensor in tensors:
        changed = content.copy()
        at = int(tensor.data_offset)
        np.frombuffer(changed, np.float32, tensor.n_elements, at)[:] *= np.float32(1.01)
        copy.write_bytes(changed)
        assert open_model(copy).digest() != original, tensor.name


def test_quantised_variants_and_other_trainings_have_other_digests(tiny: Path, tmp_path: Path) -> None:
    digests = {open_model(tiny).digest()}
    for name, options in {
        "q8": {"encoding": GGMLQuantizationType.Q8_0},
        "q4": {"encoding": GGMLQuantizationType.Q4_0},
        "seed": {"seed": 1},
    }.items():
        path = tmp_path / f"{name}.gguf"
        write_model(path, **options)
        digests.add(open_model(path).digest())
    assert len(digests) == 4


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        open_model(tmp_path / "absent.gguf")
