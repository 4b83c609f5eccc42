"""`adapter_config.json` as PEFT writes it: which modules an adapter changes, and by how much.

Only plain LoRA is known. What would change the result in another way is refused by name, and so is a setting that is
not known and is not off: an adapter that is applied in part answers wrongly, and nobody would see why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.loader.hf_values import HfValues

T = TypeVar("T")

_READ = {
    "alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
# About training, or about where it took place: they do not change what the matrices mean.
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode", "loftq_config",
    "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size",
    "revision", "runtime_config",
}  # fmt: skip
_REFUSED = {
    "use_dora": "DoRA also changes the lengths of the base model's weights",
    "modules_to_save": "it brings whole modules of its own",
    "trainable_token_indices": "it brings embeddings of its own",
    "lora_bias": "it adds biases",
    "fan_in_fan_out": "its matrices are transposed",
    "layer_replication": "it repeats layers of the base model",
    "target_parameters": "it changes parameters that are no modules",
    "alora_invocation_tokens": "it is on for a part of the text only",
    "use_qalora": "QALoRA averages its inputs",
}
_RETRAIN = "Use a plain LoRA adapter, or merge this one into its base model and serve that"
# Initialisations that leave the base model as it is. An adapter of another one, saved as it was trained, belongs to
# weights that nobody has any more.
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal")
_PLAIN_NAME = re.compile(r"[\w.]+")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What counts of the file. A name stands for the modules that have it or end in it."""

    rank: int
    alpha: float
    rank_stabilised: bool
    ranks: Mapping[str, int]  # of modules that have one of their own
    alphas: Mapping[str, float]
    targets: tuple[str, ...] | None  # None: by a regular expression, so that only the tensors say which
    excluded: tuple[str, ...]
    layers: frozenset[int] | None  # None: all

    def rank_of(self, module: str) -> int:
        """`module`: its full name, `model.layers.0.self_attn.q_proj` for one."""
        return _of_module(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of both matrices is multiplied by: `alpha / rank`, or `alpha / sqrt(rank)` where it is rank
        stabilised (arXiv 2312.03732)."""
        rank = self.rank_of(module)
        return _of_module(self.alphas, module, self.alpha) / (rank**0.5 if self.rank_stabilised else rank)

    def must_change(self, layer: int, module: str) -> bool:
        """Whether the adapter is incomplete without matrices for this module of this layer."""
        if self.targets is None or (self.layers is not None and layer not in self.layers):
            return False
        return _matches(self.targets, module) and not _matches(self.excluded, module)


def read_config(path: Path, content: Mapping[str, Any]) -> AdapterConfig:
    """The adapter that the parsed adapter_config.json at `path` describes.

    Raises ModelFileError for one that is no plain LoRA adapter, and for damaged values.
    """
    values = HfValues(path, content, {}, remedy="The file is damaged: copy the adapter again")
    _refuse_other_kinds(values, content)
    by_pattern = isinstance(content.get("target_modules"), str) or isinstance(content.get("exclude_modules"), str)
    rank_pattern, alpha_pattern = (_pattern(values, name) for name in ("rank_pattern", "alpha_pattern"))
    config = AdapterConfig(
        rank=values.integer("r"),
        alpha=values.number("lora_alpha"),
        rank_stabilised=values.flag("use_rslora"),
        ranks={name: rank_pattern.integer(name) for name in rank_pattern},
        alphas={name: alpha_pattern.number(name) for name in alpha_pattern},
        targets=None if by_pattern else _names(values, "target_modules"),
        excluded=() if by_pattern else _names(values, "exclude_modules"),
        layers=_layers(values, content.get("layers_to_transform")),
    )
    if min([config.rank, *config.ranks.values()]) < 1:
        raise values.fault("a rank is 0; it must be 1 at least")
    return config


def _refuse_other_kinds(values: HfValues, content: Mapping[str, Any]) -> None:
    """Raises ModelFileError for what is no plain LoRA adapter."""
    if "peft_type" not in values:
        raise values.fault("names no peft_type, so it describes no adapter")
    for name, only in (("peft_type", "LORA"), ("task_type", "CAUSAL_LM"), ("bias", "none")):
        if (given := content.get(name)) not in (None, only):
            raise values.fault(f"{name} {given!r:.80} is not supported, only {only!r}", _RETRAIN)
    for name, why in _REFUSED.items():
        if content.get(name):
            raise values.fault(f"{name!r} is set, which is not supported: {why}", _RETRAIN)
    start = content.get("init_lora_weights")
    if not (start is None or isinstance(start, bool) or start in _PLAIN_STARTS):
        raise values.fault(
            f"init_lora_weights is {start!r:.80}: training began with changed weights of the base model",
            "Save the adapter converted to a plain one (PEFT's path_initial_model_for_weight_conversion)",
        )
    known = _READ | _WITHOUT_EFFECT | {*_REFUSED}
    if unknown := [name for name, value in content.items() if value and name not in known]:
        raise values.fault(f"the setting {unknown[0]!r:.80} is not known here, nor what it changes", _RETRAIN)


def _pattern(values: HfValues, name: str) -> HfValues:
    pattern = values.part(name) or HfValues(values.path, {}, {})
    for key in pattern:
        if not _PLAIN_NAME.fullmatch(key):
            raise values.fault(f"{name} has {key!r:.80}, a regular expression", "Name the modules themselves there")
    return pattern


def _names(values: HfValues, name: str) -> tuple[str, ...]:
    names = values.list(name) or []
    if not all(isinstance(item, str) for item in names):
        raise values.fault(f"{name} is {names!r:.80}, not a list of modules")
    return tuple(names)


def _layers(values: HfValues, given: object) -> frozenset[int] | None:
    layers = [given] if isinstance(given, int) else given
    if layers is None:
        return None
    if not isinstance(layers, list) or not all(type(item) is int for item in layers):
        raise values.fault(f"layers_to_transform is {given!r:.80}, not a list of numbers")
    return frozenset(layers)


def _matches(names: tuple[str, ...], module: str) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _of_module(pattern: Mapping[str, T], module: str, default: T) -> T:
    """The value of the first name that stands for this module."""
    return next((value for name, value in pattern.items() if _matches((name,), module)), default)
