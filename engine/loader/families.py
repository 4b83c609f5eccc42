"""Model families as maps: how a GGUF file's metadata and tensor names become a `ModelSpec` and a `TensorSource`.

A further family whose block differs only by the spec's flags is one more line in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.loader.errors import ModelFileError
from engine.loader.gguf import GgufFile, TensorInfo
from engine.models.spec import ModelSpec, RopeSpec
from engine.models.tensors import FloatArray, LayerTensors
from engine.quant.blocks import BlockTensor


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture's GGUF files differ from the common form."""

    permuted_qk: bool = False  # Q and K rows are stored for the interleaved rotary convention
    qkv_bias: bool = False
    qk_norm: bool = False


# By `general.architecture`. Mistral's and SmolLM2's files call themselves "llama".
FAMILIES = {
    "llama": Family(permuted_qk=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
}


def read_spec(file: GgufFile) -> ModelSpec:
    """The model that `file` describes. Raises ModelFileError for an unknown family or an unsupported feature."""
    arch = file.text("general.architecture")
    family = FAMILIES.get(arch)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ModelFileError(file.path, f"architecture {arch!r} is not supported", f"Use one of: {known}")
    _refuse_unsupported(file, arch)
    hidden, heads = file.integer(f"{arch}.embedding_length"), file.integer(f"{arch}.attention.head_count")
    if heads < 1:
        raise ModelFileError(file.path, f"{heads} attention heads", "Convert the file anew")
    head_dim = file.integer(f"{arch}.attention.key_length", hidden // heads)
    linear = file.text(f"{arch}.rope.scaling.type", "none") == "linear"
    try:
        return ModelSpec(
            architecture=arch,
            num_layers=file.integer(f"{arch}.block_count"),
            hidden_size=hidden,
            intermediate_size=file.integer(f"{arch}.feed_forward_length"),
            num_heads=heads,
            num_kv_heads=file.integer(f"{arch}.attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab_size=_vocab_size(file, arch),
            max_position=file.integer(f"{arch}.context_length"),
            norm_eps=file.number(f"{arch}.attention.layer_norm_rms_epsilon"),
            rope=RopeSpec(
                theta=file.number(f"{arch}.rope.freq_base", 10_000.0),
                rotary_dim=file.integer(f"{arch}.rope.dimension_count", head_dim),
                linear_factor=file.number(f"{arch}.rope.scaling.factor", 1.0) if linear else 1.0,
            ),
            tied_embeddings="output.weight" not in file.tensors,
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
        )
    except ValueError as error:
        raise ModelFileError(file.path, str(error), "Convert the file anew") from error


def _refuse_unsupported(file: GgufFile, arch: str) -> None:
    scaling = file.text(f"{arch}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ModelFileError(file.path, f"rope scaling {scaling!r} is not supported", "Use a model without it")
    if file.integer(f"{arch}.expert_count", 0):
        raise ModelFileError(file.path, "mixture-of-experts models are not supported", "Use a dense model")
    context = file.integer(f"{arch}.context_length")
    if file.integer(f"{arch}.attention.sliding_window", context) < context:
        raise ModelFileError(file.path, "sliding-window attention is not supported", "Use a model without it")
    key_length = file.metadata.get(f"{arch}.attention.key_length")
    if file.metadata.get(f"{arch}.attention.value_length", key_length) != key_length:
        raise ModelFileError(file.path, "keys and values of different length are not supported", "Use another model")


def _vocab_size(file: GgufFile, arch: str) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(
            file.path, "tensor 'token_embd.weight' is missing", "The file is incomplete: convert it anew"
        )
    return file.integer(f"{arch}.vocab_size", embedding.shape[0])


def undo_permutation(num_heads: int, head_dim: int) -> npt.NDArray[np.int64]:
    """Row order that turns interleaved rotary pairs (2i, 2i + 1) into halves (i, i + head_dim / 2), head by head."""
    rows = np.arange(num_heads * head_dim, dtype=np.int64)
    return rows.reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).ravel()


class GgufTensors:
    """The `TensorSource` of a GGUF file. Every tensor's shape is checked against the spec when it is taken."""

    def __init__(self, file: GgufFile) -> None:
        self.spec = read_spec(file)
        self._file = file
        self._family = FAMILIES[self.spec.architecture]

    def embedding(self) -> BlockTensor:
        return self._file.tensor("token_embd.weight", (self.spec.vocab_size, self.spec.hidden_size))

    def output(self) -> BlockTensor:
        if self.spec.tied_embeddings:
            return self.embedding()
        return self._file.tensor("output.weight", (self.spec.vocab_size, self.spec.hidden_size))

    def final_norm(self) -> FloatArray:
        return self._vector("output_norm.weight", self.spec.hidden_size)

    def rope_factors(self) -> FloatArray | None:
        if "rope_freqs.weight" not in self._file.tensors:
            return None
        return self._vector("rope_freqs.weight", self.spec.rope.rotary_dim // 2)

    def layers(self) -> Iterator[LayerTensors]:
        for index in range(self.spec.num_layers):
            yield self._layer(f"blk.{index}")

    def matrices(self) -> Iterator[list[TensorInfo]]:
        """The headers of the matrices that products are made of, `output` last; those of a list share one product."""
        groups = (("attn_q", "attn_k", "attn_v"), ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",))
        for index in range(self.spec.num_layers):
            for names in groups:
                yield [self._matrix(f"blk.{index}.{name}.weight") for name in names]
        yield [self._matrix("token_embd.weight" if self.spec.tied_embeddings else "output.weight")]

    def _matrix(self, name: str) -> TensorInfo:
        info = self._file.info(name)
        if len(info.shape) != 2:
            raise ModelFileError(
                self._file.path, f"tensor {name!r} has shape {list(info.shape)}, not two", "Convert the file anew"
            )
        return info

    def _layer(self, prefix: str) -> LayerTensors:
        spec, file = self.spec, self._file
        hidden, inner = spec.hidden_size, spec.intermediate_size
        q = self._rotated(f"{prefix}.attn_q.weight", spec.num_heads)
        k = self._rotated(f"{prefix}.attn_k.weight", spec.num_kv_heads)
        v = file.tensor(f"{prefix}.attn_v.weight", (spec.kv_size, hidden))
        bias = None
        if spec.qkv_bias:
            sizes = {"q": spec.q_size, "k": spec.kv_size, "v": spec.kv_size}
            bias = np.concatenate([self._vector(f"{prefix}.attn_{part}.bias", size) for part, size in sizes.items()])
        return LayerTensors(
            attention_norm=self._vector(f"{prefix}.attn_norm.weight", hidden),
            qkv=[q, k, v],
            qkv_bias=bias,
            q_norm=self._vector(f"{prefix}.attn_q_norm.weight", spec.head_dim) if spec.qk_norm else None,
            k_norm=self._vector(f"{prefix}.attn_k_norm.weight", spec.head_dim) if spec.qk_norm else None,
            attention_output=file.tensor(f"{prefix}.attn_output.weight", (hidden, spec.q_size)),
            mlp_norm=self._vector(f"{prefix}.ffn_norm.weight", hidden),
            gate_up=[file.tensor(f"{prefix}.ffn_{part}.weight", (inner, hidden)) for part in ("gate", "up")],
            down=file.tensor(f"{prefix}.ffn_down.weight", (hidden, inner)),
        )

    def _rotated(self, name: str, num_heads: int) -> BlockTensor:
        tensor = self._file.tensor(name, (num_heads * self.spec.head_dim, self.spec.hidden_size))
        if not self._family.permuted_qk:
            return tensor
        return tensor.take_rows(undo_permutation(num_heads, self.spec.head_dim))

    def _vector(self, name: str, size: int) -> FloatArray:
        return self._file.tensor(name, (size,)).dequantize()
