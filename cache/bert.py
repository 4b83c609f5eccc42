"""A BERT sentence encoder in plain tensor operations: the same vectors as sentence-transformers, sooner and faster.

It reads models of the commonest shape (BertModel, mean pooling, normalised: all-MiniLM-L6-v2 and its relatives) and
says of any other that it does not. Loading needs neither sentence-transformers nor transformers, whose import takes
most of a start; a short text takes about two thirds of the time.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

_POOLING_MEAN_ONLY = {
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
}


class Bert:
    """The encoder. Devlin et al. 2018, post-layer-norm transformer; pooling of Reimers and Gurevych 2019.

    Attributes:
        dimension: length of a vector.
        max_tokens: window, special tokens included.
        unknown_id: token that stands for characters which the tokenizer does not know.
    """

    def __init__(self, folder: Path) -> None:
        """Read the model. Only for folders of which `is_readable` says so."""
        config = json.loads((folder / "config.json").read_text())
        self.dimension: int = config["hidden_size"]
        self.max_tokens: int = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
        self._heads: int = config["num_attention_heads"]
        self._epsilon: float = config["layer_norm_eps"]
        # Two tokenizers, because `token_ids` may run in another thread than `encode`.
        self._tokenizer, self._counting_tokenizer = _load_tokenizer(folder), _load_tokenizer(folder)
        self.unknown_id: int | None = self._tokenizer.token_to_id("[UNK]")
        weights = load_file(folder / "model.safetensors")
        self._words = weights["embeddings.word_embeddings.weight"]
        # Every token is of the first segment, so that the two remaining embeddings are one table.
        segment = weights["embeddings.token_type_embeddings.weight"][0]
        self._positions = weights["embeddings.position_embeddings.weight"] + segment
        self._norm = _norm(weights, "embeddings.LayerNorm")
        self._layers = [_Layer(weights, f"encoder.layer.{i}.") for i in range(config["num_hidden_layers"])]

    def token_ids(self, text: str) -> list[int]:
        """Tokens of a text, special tokens included, never truncated."""
        return list(self._counting_tokenizer.encode(text).ids)

    @torch.inference_mode()
    def encode(self, texts: list[str]) -> NDArray[np.float32]:
        """Unit vectors, [len(texts), dimension] float32; no text may exceed the window."""
        encodings = self._tokenizer.encode_batch(texts)
        longest = max(len(encoding.ids) for encoding in encodings)
        ids = torch.zeros(len(texts), longest, dtype=torch.long)
        real = torch.zeros(len(texts), longest, dtype=torch.bool)
        for i, encoding in enumerate(encodings):
            ids[i, : len(encoding.ids)] = torch.tensor(encoding.ids)
            real[i, : len(encoding.ids)] = True
        hidden = self._words[ids] + self._positions[:longest]  # [batch, tokens, dimension]
        hidden = F.layer_norm(hidden, (self.dimension,), *self._norm, self._epsilon)
        mask = None if bool(real.all()) else real[:, None, None, :]
        for layer in self._layers:
            hidden = self._apply(layer, hidden, mask)
        if mask is None:
            pooled = hidden.mean(dim=1)
        else:
            share = real.unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * share).sum(dim=1) / share.sum(dim=1)
        return np.asarray(F.normalize(pooled, dim=-1).numpy(), dtype=np.float32)

    def _apply(self, layer: _Layer, hidden: Tensor, mask: Tensor | None) -> Tensor:
        batch, tokens, dimension = hidden.shape
        qkv = F.linear(hidden, *layer.qkv).view(batch, tokens, 3, self._heads, dimension // self._heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, tokens, head_dim]
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        attended = F.linear(attended.transpose(1, 2).reshape(batch, tokens, dimension), *layer.attended)
        hidden = F.layer_norm(hidden + attended, (dimension,), *layer.attention_norm, self._epsilon)
        wide = F.gelu(F.linear(hidden, *layer.wide))
        return F.layer_norm(hidden + F.linear(wide, *layer.narrow), (dimension,), *layer.output_norm, self._epsilon)


class _Layer:
    """Weights of one layer, query, key and value as one matrix."""

    def __init__(self, weights: dict[str, Tensor], prefix: str) -> None:
        three = [_linear(weights, f"{prefix}attention.self.{name}") for name in ("query", "key", "value")]
        self.qkv = (torch.cat([weight for weight, _ in three]), torch.cat([bias for _, bias in three]))
        self.attended = _linear(weights, prefix + "attention.output.dense")
        self.attention_norm = _norm(weights, prefix + "attention.output.LayerNorm")
        self.wide = _linear(weights, prefix + "intermediate.dense")
        self.narrow = _linear(weights, prefix + "output.dense")
        self.output_norm = _norm(weights, prefix + "output.LayerNorm")


def is_readable(folder: Path) -> bool:
    """Whether the folder holds a model of the shape that `Bert` reads."""
    try:
        config = json.loads((folder / "config.json").read_text())
        modules = [module["type"].rsplit(".", 1)[-1] for module in json.loads((folder / "modules.json").read_text())]
        pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
        window = json.loads((folder / "sentence_bert_config.json").read_text())
    except (OSError, ValueError, KeyError):
        return False
    return (
        config.get("architectures") == ["BertModel"]
        and config.get("hidden_act") == "gelu"
        and config.get("position_embedding_type", "absolute") == "absolute"
        and modules == ["Transformer", "Pooling", "Normalize"]
        and all(pooling.get(name, False) == value for name, value in _POOLING_MEAN_ONLY.items())
        and isinstance(window.get("max_seq_length"), int)
        and not window.get("do_lower_case")
        and (folder / "model.safetensors").is_file()
        and (folder / "tokenizer.json").is_file()
    )


def _load_tokenizer(folder: Path) -> Tokenizer:
    """The model's tokenizer, without truncation or padding of its own."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _linear(weights: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    return weights[name + ".weight"].float(), weights[name + ".bias"].float()


def _norm(weights: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    return _linear(weights, name)
