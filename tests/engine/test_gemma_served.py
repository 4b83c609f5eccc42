"""Gemma 3 270M as pulled, from text to text: its tokenizer, its logits beside transformers', and the server.

Its terms have to be accepted by a person, so nothing fetches it here: `tierline models pull gemma3-270m
--accept-licence`.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
import transformers
from gguf.quants import dequantize

from engine.load_runner import load_runner
from engine.loader import read_info
from engine.text.tokenizer import Tokenizer
from gateway.models.store import ModelStore
from tests.engine.models import all_logits
from tests.engine.serving import Server

pytestmark = pytest.mark.slow
FACTS = "The capital of France is Paris. The capital of Italy is Rome. The capital of Japan is"


@pytest.fixture(scope="module")
def gemma() -> Path:
    model = ModelStore(Path(__file__).parents[2] / "var").get("gemma3-270m")
    if model is None:
        pytest.skip("not here: tierline models pull gemma3-270m --accept-licence")
    return model.path


@pytest.fixture(scope="module")
def tokenizer(gemma: Path) -> Tokenizer:
    return Tokenizer(read_info(gemma))


_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def reference(path: Path) -> transformers.PreTrainedModel:
    """transformers' model of this size, with the file's weights as the `gguf` package decodes them."""
    config = transformers.Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        max_position_embeddings=32_768,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        attn_implementation="eager",
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if "norm" in tensor.name:
            values = values - 1  # files hold what the norm multiplies by, transformers what it adds to one
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            state[f"model.layers.{parts[1]}.{_NAMES[parts[2]]}.weight"] = values
        else:
            state[{"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]] + ".weight"] = values
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def test_logits_are_transformers(gemma: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(FACTS)
    with torch.inference_mode():
        expected = reference(gemma)(torch.tensor([ids])).logits[0]
    exact = load_runner(gemma, precision="float32", max_model_len=64, kv_cache_bytes=1 << 24, max_num_seqs=2)
    logits = all_logits(exact, ids, [1, 2, 3], 7)
    assert (logits - expected).abs().max() < 1e-3 * expected.abs().max()
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_it_is_served(gemma: Path, tokenizer: Tokenizer) -> None:
    server = Server(gemma, "--precision", "auto").wait_ready()
    try:
        answer = server.complete(FACTS, max_tokens=4)
        assert answer["choices"][0]["text"].startswith(" Tokyo")
        assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode(FACTS))
    finally:
        server.stop()
