"""Quantising a folder: what is written is what was measured, in the formats' own layouts, and the text stays likely."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from engine.load_runner import load_runner
from engine.loader.errors import ModelFileError
from engine.loader.hf_weights import HfWeights
from engine.loader.safetensors import Safetensors
from engine.loader.safetensors_writer import Stored, stored, write_folder
from engine.loader.source import OpenModel, open_model
from engine.models.tensors import NetworkTensors
from engine.quantize.model import quantize_folder
from engine.quantize.texts import bundled_text, token_rows
from engine.text.tokenizer import Tokenizer
from tests.engine.byte_tokenizer import write_byte_tokenizer
from tests.engine.models import all_logits, write_model

GROUP = 32


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Path, Path, transformers.PreTrainedModel]:
    """A random model as a GGUF file and as a folder, both with the same float32 weights."""
    model = write_model(tmp_path / "tiny.gguf", tied=False)
    model.save_pretrained(tmp_path / "folder")
    write_byte_tokenizer(tmp_path / "folder")
    return tmp_path / "tiny.gguf", tmp_path / "folder", model


def texts(count: int, seed: int, model: transformers.PreTrainedModel, length: int = 48) -> torch.Tensor:
    """What the model itself writes: inputs as it will have them."""
    torch.manual_seed(seed)
    token_ids = torch.randint(0, 320, (count, 1))
    with torch.no_grad():
        while token_ids.shape[1] < length:
            likely = model(token_ids).logits[:, -1].softmax(-1)
            token_ids = torch.cat([token_ids, torch.multinomial(likely, 1)], dim=1)
    return token_ids


def their_perplexity(model: transformers.PreTrainedModel, token_ids: torch.Tensor) -> float:
    with torch.no_grad():
        logits = model(token_ids).logits[:, :-1]
    return math.exp(float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), token_ids[:, 1:].flatten())))


def load_quantised(folder: Path, model: transformers.PreTrainedModel) -> None:
    """Put the weights in `folder` into transformers' model."""
    weights = HfWeights(Safetensors(folder), json.loads((folder / "config.json").read_text()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(np.array(weights.tensor(name, tuple(parameter.shape)).dequantize())))


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_what_is_written_is_what_was_measured(
    tmp_path: Path, tiny: tuple[Path, Path, transformers.PreTrainedModel], method: str
) -> None:
    _, folder, model = tiny
    calibration, held_out = texts(24, 0, model), texts(8, 1, model)
    progress: list[tuple[int, int]] = []
    outcome = quantize_folder(
        folder,
        tmp_path / "out",
        open_model(folder).tensors(),
        method=method,
        group_size=GROUP,
        calibration=calibration,
        held_out=held_out,
        report=lambda done, total: progress.append((done, total)),
    )
    assert progress == [(1, 2), (2, 2)]
    assert outcome.perplexity_before == pytest.approx(their_perplexity(model, held_out), rel=1e-4)
    load_quantised(tmp_path / "out", model)
    assert outcome.perplexity_after == pytest.approx(their_perplexity(model, held_out), rel=1e-4)
    assert outcome.perplexity_before < outcome.perplexity_after < 1.35 * outcome.perplexity_before
    assert outcome.bytes_after < 0.6 * outcome.bytes_before  # embedding and output stay floats
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == method
    assert config["hidden_size"] == 96
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    runner = load_runner(tmp_path / "out", precision="float32", max_model_len=64, kv_cache_bytes=1 << 20)
    prompt, pages = held_out[0].tolist(), range(1, 5)
    with torch.no_grad():
        want = model(held_out[:1]).logits[0]
    assert torch.allclose(all_logits(runner, prompt, pages, 48), want, atol=1e-4)
    packed = load_runner(tmp_path / "out", max_model_len=64, kv_cache_bytes=1 << 20)
    assert torch.allclose(all_logits(packed, prompt, pages, 48), want, atol=0.02 * float(want.std()))
    with pytest.raises(ModelFileError, match="quantised already"):
        quantize_folder(
            tmp_path / "out",
            tmp_path / "again",
            open_model(folder).tensors(),
            method=method,
            group_size=GROUP,
            calibration=calibration,
            held_out=held_out,
        )


def test_calibration_pays(tmp_path: Path, tiny: tuple[Path, Path, transformers.PreTrainedModel]) -> None:
    """Both methods lose less than rounding to nearest does."""
    file, folder, model = tiny
    calibration, held_out = texts(24, 0, model), texts(16, 1, model)
    outcomes = {
        method: quantize_folder(
            folder, tmp_path / method, open_model(file).tensors(), method=method, group_size=GROUP,
            calibration=calibration, held_out=held_out,
        )
        for method in ("awq", "gptq")
    }  # fmt: skip
    from engine.quantize.grid import range_grid

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                grouped = parameter.reshape(len(parameter), -1, GROUP)
                parameter.copy_(range_grid(grouped, symmetric=False).round(grouped).reshape(parameter.shape))
    nearest = their_perplexity(model, held_out)
    for method, outcome in outcomes.items():
        assert outcome.perplexity_after < nearest, method


def test_what_cannot_be_quantised(tmp_path: Path, tiny: tuple[Path, Path, transformers.PreTrainedModel]) -> None:
    file, folder, model = tiny
    token_ids = texts(2, 0, model, length=8)

    def attempt(**changes: object) -> None:
        options = {"method": "awq", "group_size": GROUP, "calibration": token_ids, "held_out": token_ids} | changes
        quantize_folder(folder, tmp_path / "out", open_model(file).tensors(), **options)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="none of awq, gptq"):
        attempt(method="rtn")
    for size in (16, 48, 128):
        with pytest.raises(ValueError, match=f"groups of {size} do not divide"):
            attempt(group_size=size)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if "gate_proj" not in name}
    model.save_pretrained(folder, state_dict=tensors)
    with pytest.raises(ModelFileError, match="no plain dense model"):
        attempt()
    assert not (tmp_path / "out").exists()


def test_shards_are_read_as_they_were_written(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    tensors = {f"t{size}": stored(generator.standard_normal((size, 4)).astype(np.float32)) for size in (3, 50, 2, 40)}
    tensors["half"] = Stored("BF16", (2, 2), np.arange(4, dtype=np.uint16))
    for limit, shards in ((1 << 20, 1), (700, 3)):
        folder = tmp_path / str(limit)
        folder.mkdir()
        write_folder(folder, tensors, shard_bytes=limit)
        assert len(list(folder.glob("*.safetensors"))) == shards
        files = Safetensors(folder)
        assert set(files.tensors) == set(tensors)
        for name, tensor in tensors.items():
            assert files.info(name).dtype == tensor.dtype
            assert np.array_equal(files.array(name), tensor.data.reshape(tensor.shape))


def in_floats(model: OpenModel) -> transformers.PreTrainedModel:
    """A model of the Llama family as transformers' own, float32."""
    spec, source = model.spec, model.tensors()
    rope = spec.ropes[0]
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads,
        rms_norm_eps=spec.norm_eps, max_position_embeddings=spec.max_position, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
    )  # fmt: skip
    weights = {"model.embed_tokens.weight": source.embedding().dequantize(), "model.norm.weight": source.final_norm()}
    for index, layer in enumerate(source.layers()):
        assert isinstance(layer.mlp, NetworkTensors)
        matrices = [*layer.qkv, layer.attention_output, *layer.mlp.gate_up, layer.mlp.down]
        names = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
        found = {name: matrix.dequantize() for name, matrix in zip(names, matrices, strict=True)}
        found |= {"input_layernorm": layer.attention_norm, "post_attention_layernorm": layer.mlp_norm}
        weights |= {f"model.layers.{index}.{name}.weight": values for name, values in found.items()}
    theirs = transformers.LlamaForCausalLM(config).eval()
    tensors = {name: torch.from_numpy(np.array(values)) for name, values in weights.items()}
    assert theirs.load_state_dict(tensors, strict=False).missing_keys == ["lm_head.weight"]
    return theirs


@pytest.mark.slow
@pytest.mark.parametrize(("method", "most"), [("awq", 1.25), ("gptq", 1.35)])
def test_the_small_model_stays_itself(tmp_path: Path, smollm2_path: Path, method: str, most: float) -> None:
    """SmolLM2-135M on the bundled text. So small a model suffers more from four bits than larger ones do."""
    folder, opened = tmp_path / "folder", open_model(smollm2_path)
    theirs = in_floats(opened)
    theirs.save_pretrained(folder)
    calibration, held_out = map(torch.tensor, token_rows(bundled_text(), Tokenizer(opened.info), 256, 24))
    outcome = quantize_folder(
        folder,
        tmp_path / "out",
        opened.tensors(),
        method=method,
        group_size=64,
        calibration=calibration,
        held_out=held_out,
    )
    assert outcome.perplexity_after < most * outcome.perplexity_before
    assert outcome.bytes_after < 0.5 * outcome.bytes_before  # a fifth of this model is its embedding, which stays
    load_quantised(tmp_path / "out", theirs)
    assert outcome.perplexity_after == pytest.approx(their_perplexity(theirs, held_out), rel=0.01)
