"""What is no adapter for the model is refused when it is read, with the file, the fault and the remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.adapters.peft import find_folder, read_adapter
from engine.adapters.targets import adapter_values
from engine.loader.errors import ModelFileError
from tests.engine.adapters import ATTENTION, write_adapter
from tests.engine.hf_models import open_folder, random_model, write_folder

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The spec of a small Llama, and a good adapter for it."""
    folder = tmp_path_factory.mktemp("files")
    base = write_folder(folder / "base", "Llama")
    write_adapter(folder / "good", base)
    return open_folder(folder / "base").spec, folder / "good"


@pytest.fixture
def adapter(made, tmp_path):
    """A copy of the good one to be spoilt, and its reader."""
    spec, good = made
    folder = tmp_path / "adapter"
    shutil.copytree(good, folder)
    return folder, lambda most_rank=64: read_adapter(folder, spec, most_rank=most_rank)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_good_one_is_counted_and_known_by_its_content(made, adapter):
    spec, _ = made
    folder, read = adapter
    first = read()
    numbers = sum(pair.down.size + pair.up.size for pairs in first.layers.values() for pair in pairs)
    assert first.rank == 4
    assert numbers == adapter_values(spec, 4)
    assert read().digest == first.digest
    change_config(folder, lora_dropout=0.5, inference_mode=False)
    assert read().digest == first.digest  # nothing that changes an answer
    change_config(folder, lora_alpha=9)
    assert read().digest != first.digest
    change_config(folder, lora_alpha=8)

    def one_bit(tensors):
        tensors[f"{Q0}.lora_A.weight"].view(np.uint32)[0, 0] ^= 1

    change_tensors(folder, one_bit)
    assert read().digest != first.digest


def test_what_was_read_does_not_change_with_the_file(adapter):
    folder, read = adapter
    before = read()
    kept = before.layers[0][0].down.copy()
    path = folder / "adapter_model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert (before.layers[0][0].down == kept).all()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"peft_type": None}, "names no peft_type"),
        ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS' is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"use_dora": True}, "'use_dora' is set.*DoRA"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is set.*whole modules"),
        ({"trainable_token_indices": [1]}, "embeddings of its own"),
        ({"lora_bias": True}, "adds biases"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'.*changed weights of the base model"),
        ({"shiny_new_trick": True}, "the setting 'shiny_new_trick' is not known"),
        ({"r": 0}, "a rank is 0"),
        ({"r": "8"}, "'r' is '8', not a whole number.*copy the adapter again"),
        ({"lora_alpha": None}, "'lora_alpha' is missing"),
        ({"lora_alpha": 10**400}, "'lora_alpha' is 1000000.*, not a number"),
        ({"lora_alpha": 1e300}, "q_proj is not finite any more once it is scaled"),
        ({"rank_pattern": {"q_.*": 3}}, "a regular expression"),
        ({"target_modules": [3]}, "target_modules is \\[3\\]"),
        ({"layers_to_transform": ["one"]}, "layers_to_transform"),
        ({"r": 5}, r"shape \[4, 64\].* ask for \[5, 64\].*trained on this very model"),
        ({"target_modules": ["q_proj", "o_proj", "lm_head"], "rank_pattern": {"v_proj": 65}}, "rank 65 is above 64"),
    ],
)
def test_a_configuration_of_another_kind_is_refused(adapter, changes, text):
    folder, read = adapter
    change_config(folder, **changes)
    with pytest.raises(ModelFileError, match=text) as refusal:
        read()
    assert "adapter_" in str(refusal.value.path)  # which file it is about


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop(f"{Q0}.lora_B.weight"), "q_proj.lora_B.weight' is missing"),
        (lambda t: [t.pop(f"{Q0}.lora_{half}.weight") for half in "AB"], "no matrices for self_attn.q_proj"),
        (lambda t: t.clear(), "layer 0 has no matrices"),
        (lambda t: t.update({f"{Q0}.lora_A.weight": np.ones((4, 65), np.float32)}), r"shape \[4, 65\]"),
        (lambda t: t.update({f"{Q0}.lora_B.weight": np.full((64, 4), np.nan, np.float32)}), "not finite"),
        (lambda t: t.update({f"{Q0}.lora_B.weight": np.full((64, 4), np.inf, np.float16)}), "not finite"),
        (lambda t: t.update({f"{Q0}.lora_A.weight": np.ones((4, 64), np.int8)}), "is of type I8"),
        (
            lambda t: t.update({"base_model.model.model.layers.4.self_attn.q_proj.lora_A.weight": np.ones((4, 64))}),
            "changes what the model does not have",
        ),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": np.ones((4, 64))}),
            "none of a layer's LoRA matrices.*can change these modules.*self_attn.q_proj",
        ),
        (
            lambda t: t.update({"base_model.model.model.layers.0.mlp.experts.0.w1.lora_A.weight": np.ones((4, 64))}),
            "changes what the model does not have",
        ),
        (
            lambda t: t.update({"base_model.model.layers.0.self_attn.q_proj.lora_A.weight": np.ones((4, 64))}),
            "under two names",
        ),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(adapter, change, text):
    folder, read = adapter
    change_tensors(folder, change)
    with pytest.raises(ModelFileError, match=text):
        read()


def test_no_tensors_at_all(adapter):
    folder, read = adapter
    change_config(folder, target_modules=".*q_proj")
    change_tensors(folder, lambda tensors: tensors.clear())
    with pytest.raises(ModelFileError, match="has no tensors"):
        read()


@pytest.mark.parametrize("kept", [0, 5, 0.3, 0.99])
def test_a_file_that_is_broken_off(adapter, kept):
    folder, read = adapter
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if kept < 1 else kept])
    with pytest.raises(ModelFileError, match=r"adapter_model.safetensors: (truncated|cannot be read)"):
        read()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"r": 1'])
def test_a_damaged_configuration(adapter, text):
    folder, read = adapter
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"adapter_config.json: its JSON is"):
        read()


def test_a_rank_above_the_limit(adapter):
    _, read = adapter
    assert read(4).rank == 4
    with pytest.raises(ModelFileError, match=r"rank 4 is above 3.*'--max-lora-rank'"):
        read(3)


def test_an_adapter_of_experts_is_refused_and_one_of_their_attention_is_not(tmp_path):
    base = write_folder(tmp_path / "base", "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    spec = open_folder(tmp_path / "base").spec
    write_adapter(tmp_path / "attention", base, target_modules=ATTENTION)
    assert len(read_adapter(tmp_path / "attention", spec, most_rank=64).layers) == 4
    write_adapter(tmp_path / "gate", base, target_modules=["q_proj"])
    change_tensors(
        tmp_path / "gate",
        lambda t: t.update({"base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight": np.ones((4, 64))}),
    )
    with pytest.raises(ModelFileError, match="changes what the model does not have"):
        read_adapter(tmp_path / "gate", spec, most_rank=64)


def test_an_adapter_of_a_wider_model(made, tmp_path):
    write_adapter(tmp_path, random_model("Llama", hidden_size=96, num_attention_heads=6))
    with pytest.raises(ModelFileError, match=r"shape.*trained on this very model"):
        read_adapter(tmp_path, made[0], most_rank=64)


class TestFolders:
    @pytest.fixture
    def root(self, tmp_path):
        root = tmp_path / "root"
        for folder in (root / "one", tmp_path / "outside", root / "deep" / "two"):
            folder.mkdir(parents=True)
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                (folder / name).write_text("{}")
        return root

    def test_below_the_root(self, root):
        assert find_folder("one", root) == root / "one"
        assert find_folder("deep/../one", root) == root / "one"
        assert find_folder(str(root / "deep" / "two"), root) == root / "deep" / "two"
        (root / "alias").symlink_to(root / "one")
        assert find_folder("alias", root) == root / "one"

    def test_a_root_that_is_a_link_itself(self, root, tmp_path):
        (tmp_path / "link").symlink_to(root)
        assert find_folder("one", tmp_path / "link") == root / "one"
        assert find_folder(str(tmp_path / "link" / "one"), tmp_path / "link") == root / "one"

    @pytest.mark.parametrize("path", ["../outside", "/etc", "", ".", "..", "one/../../outside", "../absent", "/absent"])
    def test_outside_the_root(self, root, path):
        with pytest.raises(ModelFileError, match=r"lies outside the folder of adapters.*'--lora-dir'"):
            find_folder(path, root)

    def test_a_link_out_of_the_root(self, root, tmp_path):
        (root / "link").symlink_to(tmp_path / "outside")
        with pytest.raises(ModelFileError, match="lies outside"):
            find_folder("link", root)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (root / "one" / name).unlink()
            (root / "one" / name).symlink_to(tmp_path / "outside" / name)
            with pytest.raises(ModelFileError, match="lies outside"):
                find_folder("one", root)
            (root / "one" / name).unlink()
            (root / "one" / name).write_text("{}")

    def test_what_is_not_there(self, root):
        with pytest.raises(ModelFileError, match="no such folder"):
            find_folder("absent", root)
        with pytest.raises(ModelFileError, match="no such folder"):
            find_folder("a\0b", root)
        (root / "circle").symlink_to(root / "circle")
        with pytest.raises(ModelFileError, match="no such folder"):
            find_folder("circle", root)
        (root / "one" / "adapter_model.safetensors").unlink()
        with pytest.raises(
            ModelFileError, match=r"has no file adapter_model.safetensors. Save the adapter with safetens"
        ):
            find_folder("one", root)
        (root / "one" / "adapter_config.json").unlink()
        with pytest.raises(ModelFileError, match=r"has no file adapter_config.json"):
            find_folder("one", root)

    def test_without_a_root_anywhere(self, root, tmp_path):
        assert find_folder(str(tmp_path / "outside"), None) == tmp_path / "outside"
