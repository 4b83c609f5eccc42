"""Random LoRA adapters, made and saved by PEFT itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from engine.adapters.low_rank import AdapterWeights, StepAdapters
from engine.adapters.peft import read_adapter
from engine.geometry import step_geometry
from engine.types import SamplingParams, StepRow
from tests.engine.hf_models import PAGE, Model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
GREEDY = SamplingParams(temperature=0.0)


def write_adapter(
    path: Path, base: transformers.PreTrainedModel, *, seed: int = 0, size: float = 0.3, **options: Any
) -> peft.PeftModel:
    """Save a random adapter for `base` to the folder `path`; returns PEFT's own model with it.

    `options`: of LoraConfig. `size`: of the numbers in B, which begin as zeros.
    """
    settings = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ALL} | options
    torch.manual_seed(seed)
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, size)
    model.save_pretrained(path)
    return model


class Adapted:
    """A model with adapters."""

    def __init__(self, model: Model) -> None:
        self._decoder = model.decoder
        self._step = StepAdapters(torch.device("cpu"))
        model.decoder.adapt(self._step)

    @torch.inference_mode()
    def logits(self, folders: Sequence[Path | None], texts: Sequence[Sequence[int]], chunk: int) -> list[torch.Tensor]:
        """float32 logits `[tokens, vocab]` of each text under the adapter in its folder, all texts in the same steps.

        Every step takes the next `chunk` tokens of each.
        """
        decoder, step = self._decoder, self._step
        for number, folder in enumerate(folders, 1):
            if folder is not None:
                adapter = read_adapter(folder, decoder.spec, most_rank=64)
                step.loaded[number] = AdapterWeights(adapter, torch.float32, torch.device("cpu"))
        decoder.attention.kv_cache.fill_(torch.nan)
        free = list(range(1, 64))
        tables = [[free.pop() for _ in range(-(-len(text) // PAGE))] for text in texts]
        parts: list[list[torch.Tensor]] = [[] for _ in texts]
        for start in range(0, max(map(len, texts)), chunk):
            living = [(i, text[start : start + chunk]) for i, text in enumerate(texts) if start < len(text)]
            living.sort(key=lambda pair: len(pair[1]) > 1)
            rows = [
                StepRow(i, part, start, tables[i], True, GREEDY, texts[i], 1, adapter=i + 1 if folders[i] else 0)
                for i, part in living
            ]
            geometry = step_geometry(rows, PAGE, 1 << 20)
            decoder.attention.begin(geometry)
            assert step.begin(rows, geometry.query_starts) == {}
            ids = torch.tensor([token for row in rows for token in row.token_ids])
            hidden = decoder.hidden(ids, torch.from_numpy(geometry.positions), torch.arange(len(ids)))
            pieces = decoder.logits(hidden).clone().split([len(part) for _, part in living])
            for (i, _), piece in zip(living, pieces, strict=True):
                parts[i].append(piece)
        return [torch.cat(part) for part in parts]
