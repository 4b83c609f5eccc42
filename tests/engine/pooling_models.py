"""Small random embedders and rerankers as Hugging Face folders, and transformers' numbers for them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.engine.byte_tokenizer import write_byte_tokenizer
from tests.engine.hf_models import SMALL

TEXTS = [[9], list(range(3, 40)), [int(i) for i in np.random.default_rng(1).integers(1, 250, 70)]]
_CHAIN = ("Transformer", "Pooling", "Normalize")


def _random(model_class: type[transformers.PreTrainedModel], **options: object) -> transformers.PreTrainedModel:
    config = transformers.Qwen3Config(
        **copy.deepcopy({**SMALL, "head_dim": 16, "pad_token_id": None, "max_position_embeddings": 1024} | options)
    )
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    return model


def write_embedder(path: Path, kind: str, *, normalise: bool = True) -> transformers.PreTrainedModel:
    """A folder as Sentence Transformers writes it, the blocks saved without an output matrix.

    `kind`: of the flags in `1_Pooling/config.json`, behind `pooling_mode_`.
    """
    model = _random(transformers.Qwen3Model)
    model.save_pretrained(path)
    write_byte_tokenizer(path)
    names = _CHAIN if normalise else _CHAIN[:2]
    chain = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(names)
    ]
    (path / "modules.json").write_text(json.dumps(chain))
    (path / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name == kind for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    pooling = {"word_embedding_dimension": SMALL["hidden_size"], **modes, "include_prompt": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return model


def write_reranker(path: Path, *, num_labels: int = 1) -> transformers.PreTrainedModel:
    """A sequence classifier."""
    model = _random(transformers.Qwen3ForSequenceClassification, num_labels=num_labels)
    model.save_pretrained(path)
    write_byte_tokenizer(path)
    return model


@torch.no_grad()
def reference_vector(model: transformers.PreTrainedModel, text: Sequence[int], kind: str) -> np.ndarray:
    """float32 `[hidden]`: of a model of blocks alone, not normalised."""
    states = model(torch.tensor([list(text)])).last_hidden_state[0]
    pooled = {"lasttoken": states[-1], "mean_tokens": states.mean(dim=0), "cls_token": states[0]}
    return pooled[kind].numpy()
