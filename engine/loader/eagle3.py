"""An EAGLE-3 head as it is published (arXiv 2503.01840): a folder with config.json and safetensors. Imports no torch.

The head is one decoder layer that drafts from the states of a bigger model: `fc` fuses three of them, the layer's
attention takes the fused state beside the embedding of the next token, and `lm_head` has a vocabulary of its own, whose
entries `d2t` maps to the model's tokens: token = entry + d2t[entry]. Two layouts are read, the authors' and that of the
`speculators` library, whose sizes lie in `transformer_layer_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.loader.errors import ModelFileError
from engine.loader.folder import Folder
from engine.loader.hf_config import read_hf_spec
from engine.loader.hf_values import HfValues
from engine.loader.safetensors import Safetensors
from engine.models.spec import ModelSpec
from engine.quant.matrix import WeightMatrix

_CONFIG = "config.json"
_ANOTHER = "Give an EAGLE-3 head that was trained for this model, or use '--speculative draft' for a small model"
# Variants that change the computation; published heads say them only where they are on.
_UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias")
_LAYER_PREFIXES = ("midlayer.", "layers.0.", "model.midlayer.", "model.layers.0.")
NUM_TAPS = 3


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Sizes of a head. `layer`: its decoder layer, as a model of one."""

    layer: ModelSpec
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]  # the layers of the model whose inputs are fused
    norm_before_residual: bool  # the layer adds to the normed state and not to the fused one
    own_embedding: bool

    @property
    def num_parameters(self) -> int:
        """Of its matrices and norms."""
        layer, hidden = self.layer, self.layer.hidden_size
        attention = hidden * (2 * (layer.q_size + 2 * layer.kv_size) + layer.q_size)
        embedding = layer.vocab_size * hidden * self.own_embedding
        fused = NUM_TAPS * self.target_hidden_size * hidden
        return attention + 3 * hidden * layer.intermediate_size + fused + self.draft_vocab_size * hidden + embedding


class HeadFiles:
    """A head for a model of the spec `target`.

    Raises ModelFileError for files that are missing or damaged, no head, or one for another model.
    """

    def __init__(self, path: Path | str, target: ModelSpec) -> None:
        self.path = Path(path)
        folder = Folder(self.path)
        config = folder.parse(_CONFIG, folder.need(_CONFIG, "the shape of the head"))
        if (self.path / "pytorch_model.bin").exists() and not any(self.path.glob("*.safetensors")):
            raise ModelFileError(
                self.path, "its weights are in pytorch_model.bin, which can run code", "Convert them to safetensors"
            )
        self._files = Safetensors(self.path)
        self._layer = next((p for p in _LAYER_PREFIXES if f"{p}self_attn.q_proj.weight" in self._files.tensors), None)
        if self._layer is None or self._outer("fc.weight") not in self._files.tensors:
            raise ModelFileError(self.path, "it has no fc.weight and one layer: no EAGLE-3 head", _ANOTHER)
        embedding = self._outer("embed_tokens.weight")
        self.spec = _read_spec(self.path, config, target, own_embedding=embedding in self._files.tensors)

    def _outer(self, name: str) -> str:
        """The name of a tensor outside of the layer."""
        prefixed = f"model.{name}"
        return prefixed if prefixed in self._files.tensors else name

    def layer_matrix(self, name: str, rows: int, columns: int) -> WeightMatrix:
        """A matrix of the layer by its role, `self_attn.q_proj` for one."""
        return self._files.tensor(f"{self._layer}{name}.weight", (rows, columns))

    def layer_norm(self, name: str) -> npt.NDArray[np.float32]:
        """A norm of the layer by its role."""
        return self._files.tensor(f"{self._layer}{name}.weight", (self.spec.layer.hidden_size,)).dequantize()

    def final_norm(self) -> npt.NDArray[np.float32]:
        return self._files.tensor(self._outer("norm.weight"), (self.spec.layer.hidden_size,)).dequantize()

    def fuse(self) -> WeightMatrix:
        """`fc`: `[hidden, 3 * target hidden]`."""
        shape = (self.spec.layer.hidden_size, NUM_TAPS * self.spec.target_hidden_size)
        return self._files.tensor(self._outer("fc.weight"), shape)

    def output(self) -> WeightMatrix:
        """`lm_head`: `[draft vocabulary, hidden]`."""
        return self._files.tensor("lm_head.weight", (self.spec.draft_vocab_size, self.spec.layer.hidden_size))

    def embedding(self) -> WeightMatrix | None:
        """`[vocabulary, hidden]`; None: the model's own serves."""
        if not self.spec.own_embedding:
            return None
        shape = (self.spec.layer.vocab_size, self.spec.layer.hidden_size)
        return self._files.tensor(self._outer("embed_tokens.weight"), shape)

    def tokens(self) -> npt.NDArray[np.int64]:
        """The model's token for every entry of the draft vocabulary, `[draft vocabulary]`.

        Raises ModelFileError for a map that leads out of the vocabulary or to one token twice.
        """
        entries = np.arange(self.spec.draft_vocab_size, dtype=np.int64)
        if "d2t" not in self._files.tensors:
            if self.spec.draft_vocab_size != self.spec.layer.vocab_size:
                raise ModelFileError(self.path, "tensor 'd2t' is missing, and its vocabulary is smaller", _ANOTHER)
            return entries
        offsets = self._files.array("d2t", entries.shape)
        if offsets.dtype.kind != "i":
            raise ModelFileError(self.path, "tensor 'd2t' does not hold integers", "Download the head again")
        tokens = entries + offsets.astype(np.int64)
        size = self.spec.layer.vocab_size
        if tokens.min() < 0 or tokens.max() >= size or len(np.unique(tokens)) < len(tokens):
            raise ModelFileError(
                self.path, f"tensor 'd2t' does not map to different tokens of a vocabulary of {size}", _ANOTHER
            )
        return tokens


def _read_spec(path: Path, config: Mapping[str, Any], target: ModelSpec, *, own_embedding: bool) -> HeadSpec:
    top = HfValues(path / _CONFIG, config, {})
    nested = top.part("transformer_layer_config")
    sizes = config if nested is None else config["transformer_layer_config"]
    layer_values = HfValues(path / _CONFIG, sizes, {})
    for values in (top, layer_values):
        for name in _UNSUPPORTED:
            if values.flag(name):
                raise values.fault(f"{name!r} is not supported", "Use a head without it")
    if layer_values.integer("num_hidden_layers", 1) != 1:
        raise top.fault("more than one layer is declared: no EAGLE-3 head", _ANOTHER)
    fixed = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "layer_types": None,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
    }
    layer = read_hf_spec(path / _CONFIG, {**sizes, **fixed})
    draft_vocab_size = top.integer("draft_vocab_size", target.vocab_size)
    if not 1 <= draft_vocab_size <= target.vocab_size:
        raise top.fault(f"{draft_vocab_size} draft tokens for a model of {target.vocab_size}", _ANOTHER)
    declared = top.integer("target_hidden_size", target.hidden_size)
    if declared != target.hidden_size or (layer.hidden_size != target.hidden_size and not own_embedding):
        theirs = declared if declared != target.hidden_size else layer.hidden_size
        raise top.fault(f"it is for a model of width {theirs}, and this one has {target.hidden_size}", _ANOTHER)
    return HeadSpec(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        taps=_taps(top, target.num_layers),
        norm_before_residual=top.flag("norm_before_residual"),
        own_embedding=own_embedding,
    )


def _taps(values: HfValues, num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are read: `eagle_aux_hidden_state_layer_ids` says so; within `eagle_config` it counts the
    layers whose outputs are read. Without it, the paper's low, middle and high ones."""
    part = values.part("eagle_config")
    key, shift = "eagle_aux_hidden_state_layer_ids", 0
    listed = values.list(key)
    if part is not None:
        if "use_aux_hidden_state" in part and not part.flag("use_aux_hidden_state"):
            raise values.fault("it reads no states of inner layers: an older kind of EAGLE", _ANOTHER)
        if not listed:
            listed, shift = part.list(key), 1
    taps = [2, num_layers // 2, num_layers - 3]
    if listed:
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in listed):
            raise values.fault(f"{key!r} is no list of numbers")
        taps = [one + shift for one in listed]
    if len(taps) != NUM_TAPS or sorted(set(taps)) != taps or not 0 <= taps[0] <= taps[-1] < num_layers:
        raise values.fault(f"it reads the states before layers {taps}, and the model has {num_layers} layers", _ANOTHER)
    return tuple(taps)
