"""Small random models as Hugging Face folders, written by transformers, and a decoder that reads them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.geometry import step_geometry
from engine.layers.attention import AttentionConfig
from engine.layers.device import build_attention, build_ops
from engine.layers.linear import LinearPolicy
from engine.loader.hf_config import read_family, read_hf_spec
from engine.loader.hf_tensors import HfTensors
from engine.loader.hf_weights import HfWeights
from engine.loader.safetensors import Safetensors
from engine.models.decoder import Decoder
from engine.models.tensors import TensorSource
from tests.engine.models import row

PAGE = 16
SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}


def random_model(family: str, *, seed: int = 0, **options: Any) -> transformers.PreTrainedModel:
    """A random model of transformers' classes `{family}Config` and `{family}ForCausalLM`.

    The attributes of its configuration are the small ones, changed by `options`.
    """
    name = {"Gemma3": "Gemma3Text"}.get(family, family)
    config = getattr(transformers, f"{name}Config")(**copy.deepcopy(SMALL | options))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "sinks" in key:
                parameter.normal_(0.5, 1.0)
            else:
                parameter.normal_(0.0, 0.15)
    return model


def write_folder(path: Path, family: str, *, shard_size: str = "5GB", **options: Any) -> transformers.PreTrainedModel:
    """Write a random model to the folder `path`; returns it. Arguments as for `random_model`."""
    model = random_model(family, **options)
    model.save_pretrained(path, max_shard_size=shard_size)
    return model


def open_folder(path: Path) -> HfTensors:
    """The tensors of the folder at `path`."""
    config = json.loads((path / "config.json").read_text())
    spec = read_hf_spec(path / "config.json", config)
    return HfTensors(spec, read_family(path / "config.json", config), HfWeights(Safetensors(path), config))


@dataclass(frozen=True)
class Model:
    """A decoder with pages of its own, all poisoned: what was not written must not be read."""

    decoder: Decoder

    @classmethod
    def load(cls, source: TensorSource, max_model_len: int, dtype: torch.dtype = torch.float32) -> Model:
        spec, device = source.spec, torch.device("cpu")
        config = AttentionConfig(
            num_layers=spec.num_layers,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.score_scale,
            num_blocks=64,
            block_size=PAGE,
            dtype=dtype,
            device=device,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            max_blocks_per_seq=-(-max_model_len // PAGE),
            windows=tuple(layer.window for layer in spec.layers),
            softcap=spec.attention_softcap,
            sinks=spec.sinks,
        )
        attention = build_attention(config)
        policy = LinearPolicy(device, dtype, packed_rows=0)
        return cls(Decoder(source, policy, attention, build_ops(device), max_position=max_model_len))

    @torch.inference_mode()
    def logits(self, texts: Sequence[Sequence[int]], chunks: Sequence[int]) -> list[torch.Tensor]:
        """float32 logits `[tokens, vocab]` of each text. Every step takes the next `chunks[i]` tokens of text `i`, all
        texts in one step, those with one token first."""
        decoder = self.decoder
        decoder.attention.kv_cache.fill_(torch.nan)
        free = [(5 * page) % 63 + 1 for page in range(63)]  # in no order
        tables = [[free.pop() for _ in range(-(-len(text) // PAGE))] for text in texts]
        done = [0] * len(texts)
        parts: list[list[torch.Tensor]] = [[] for _ in texts]
        while any(at < len(text) for at, text in zip(done, texts, strict=True)):
            takes = [(min(chunks[i], len(text) - done[i]), i) for i, text in enumerate(texts) if done[i] < len(text)]
            takes.sort()
            rows = [row(texts[i], tables[i], start=done[i], stop=done[i] + take, request_id=i) for take, i in takes]
            step = step_geometry(rows, PAGE, 1 << 20)
            decoder.attention.begin(step)
            ids = torch.tensor([token for one in rows for token in one.token_ids])
            hidden = decoder.hidden(ids, torch.from_numpy(step.positions), torch.arange(len(ids)))
            pieces = decoder.logits(hidden).clone().split_with_sizes([take for take, _ in takes])
            for (take, i), piece in zip(takes, pieces, strict=True):
                parts[i].append(piece)
                done[i] += take
        return [torch.cat(part) for part in parts]
