"""The one door to a model: what it says of a file or a folder, and what tells models apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType

from engine.__main__ import find_model
from engine.load_runner import load_runner
from engine.loader import GenerationDefaults, ModelFileError, open_model, read_info
from engine.loader.folder import Folder
from engine.loader.hf_tokenizer import read_templates
from engine.server.model import Model
from engine.server.params import SamplingDefaults
from engine.server.schema import ChatExtras
from tests.engine.hf_models import write_folder
from tests.engine.models import generate, write_model
from tests.engine.serving import Server, encode_chat
from tests.engine.tokenizer_kinds import write_folder as write_tokenizer


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


# --- folders ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with a tokenizer and everything else that such folders hold."""
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    write_folder(path, "Llama", vocab_size=600, shard_size="100KB", bos_token_id=None, eos_token_id=None)
    write_tokenizer(path, "space first")
    (path / "generation_config.json").write_text('{"eos_token_id": [258, 259], "temperature": 0.7, "top_k": 20}')
    (path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    (path / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Tiny\nlicense: none\n")
    return path


def test_a_folder_says_what_it_is(folder: Path) -> None:
    info = read_info(folder)
    assert (info.name, info.format, info.quantization, info.licence) == (
        "tiny-llama",
        "huggingface",
        "F32",
        "apache-2.0",
    )
    assert info.spec.vocab_size == 600
    assert info.generation == GenerationDefaults(temperature=0.7, top_k=20)
    assert info.tokenizer.end_ids == {258, 259}
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert info.file_bytes == sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def test_a_folder_serves_requests(folder: Path) -> None:
    model = Model.load(folder, "m", GenerationDefaults(temperature=0.5))
    assert model.sampling == SamplingDefaults(temperature=0.5, top_k=20)
    assert Model.load(folder, "m", recommended=False).sampling == SamplingDefaults()
    ids = encode_chat(model, [{"role": "user", "content": "the cat </s>"}], ChatExtras())
    bos, eos = model.tokenizer.bos_id, model.tokenizer.eos_id
    assert (ids[0], ids.count(bos), ids[-1], ids.count(eos)) == (bos, 1, eos, 1), "one BOS, and no turn is forged"
    runner = load_runner(folder, precision="float32", max_model_len=64, kv_cache_bytes=1 << 22, max_num_seqs=2)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = generate(runner, ids, 8, pages=[1, 2, 3, 4])
    with torch.inference_mode():
        theirs = reference.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert ours == theirs[0, len(ids) :].tolist()


def test_the_command_line_takes_files_folders_and_names(
    folder: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_model(str(folder), tmp_path) == folder
    assert find_model(str(tiny), tmp_path) == tiny
    pulled = tmp_path / "models" / "mine"
    pulled.mkdir(parents=True)
    (pulled / "weights.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()  # a folder of that name that is no model
    assert find_model("mine", tmp_path) == pulled / "weights.gguf"
    with pytest.raises(FileNotFoundError, match=r"models: a folder without config\.json"):
        find_model(str(tmp_path / "models"), tmp_path)
    for absent in ("some/absent", "absent.gguf"):
        with pytest.raises(FileNotFoundError, match="no such file or folder"):
            find_model(absent, tmp_path)
    with pytest.raises(FileNotFoundError, match="tierline models pull absent"):
        find_model("absent", tmp_path)


@pytest.mark.slow
def test_a_folder_is_served_over_http(folder: Path) -> None:
    server = Server(folder).wait_ready()
    try:
        answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "the cat"}], max_tokens=5)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] <= 5
        tokens = server.post("/tokenize", prompt="the cat").json()["tokens"]
        assert server.post("/detokenize", tokens=tokens).json()["prompt"].endswith("the cat")
    finally:
        server.stop()


def test_templates_come_from_wherever_folders_keep_them(folder: Path, tmp_path: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())

    def templates(files: dict[str, str]) -> tuple[str | None, str | None]:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text)
        return read_templates(Folder(path))

    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    in_settings = {"tokenizer_config.json": json.dumps(settings | {"chat_template": "one"})}
    assert templates({"chat_template.json": '{"chat_template": "old"}'}) == ("old", None)
    assert templates(in_settings) == ("one", None)
    assert templates({"tokenizer_config.json": json.dumps({"chat_template": named})}) == ("d", "t")
    assert templates(in_settings | {"chat_template.jinja": "file"}) == ("file", None)
    assert templates({"chat_template.jinja": "f", "additional_chat_templates/tool_use.jinja": "t"}) == ("f", "t")
    with pytest.raises(ModelFileError, match="without one called 'default'"):
        templates({"tokenizer_config.json": json.dumps({"chat_template": named[1:]})})


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model-00002-of", "model.safetensors.index.json"])
def test_a_half_copied_folder_names_the_missing_file(folder: Path, tmp_path: Path, missing: str) -> None:
    for file in folder.iterdir():
        if not file.name.startswith(missing):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelFileError, match=missing):
        read_info(tmp_path)


def test_a_file_broken_off_is_named(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for name in ("config.json", "tokenizer.json", "generation_config.json", next(folder.glob("*.safetensors")).name):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ModelFileError, match=name):
            read_info(tmp_path)
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "generation_config.json").write_text('{"top_p": 3}')
    with pytest.raises(ModelFileError, match="top_p is 3, not 0 to 1"):
        read_info(tmp_path)


def test_folders_are_told_apart_by_what_is_in_them(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "renamed"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    original = open_model(folder).digest()
    assert open_model(copy).digest() == original
    shard = sorted(copy.glob("*.safetensors"))[-1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert open_model(copy).digest() != original
    write_folder(copy, "Llama", vocab_size=600, shard_size="100KB", seed=1)
    assert open_model(copy).digest() != original


def test_descriptions_for_those_who_must_not_import_the_engine(folder: Path, tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine.describe", str(folder), str(tiny), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    first, second, third = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 1
    assert (first["name"], first["quantization"], first["has_chat_template"]) == ("tiny-llama", "F32", True)
    assert first["recommended_sampling"] == {"temperature": 0.7, "top_k": 20}
    assert (second["format"], second["family"]) == ("gguf", "llama")
    assert "config.json" in third["error"]
