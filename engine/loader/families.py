"""Model families as maps: how a GGUF file's metadata and tensor names become a `ModelSpec` and a `TensorSource`.

A further family whose block differs only by the spec's flags is one more line in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from engine.loader.errors import ModelFileError
from engine.loader.gguf import GgufFile, TensorInfo
from engine.loader.layers import checked_depth, context_length, plan_layers, repeating, yarn_attention_factor
from engine.models.rope import FactorScaling, LinearScaling, LongRopeScaling, RopeScaling, RopeSpec, YarnScaling
from engine.models.spec import Activation, ModelSpec, MoeSpec
from engine.models.tensors import ExpertTensors, FloatArray, LayerTensors, NetworkTensors
from engine.quant.blocks import BlockTensor


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture's GGUF files differ from the common form."""

    permuted_qk: bool = False  # Q and K rows are stored for the interleaved rotary convention
    fused: bool = False  # Q, K and V are one tensor, gate and up another, called `ffn_up`
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    sinks: bool = False
    scaled_embedding: bool = False  # by the square root of its width
    activation: Activation = Activation.SILU
    # With a window: every so many layers attend to all tokens; 0: none, None: windows are not this family's.
    full_every: int | None = None
    local_theta: float | None = None  # rotary base of the layers with a window, where it is another one
    no_rope_every: int = 0
    truncate_yarn: bool = True
    # Depths at which scores are scaled by hidden_size / heads, not by head_dim: the files do not say.
    scaled_by_width: tuple[int, ...] = ()
    experts: bool = False
    expert_bias: bool = False
    mlp_norm: str = "ffn_norm"


# By `general.architecture`. Mistral's, Mixtral's and SmolLM2's files call themselves "llama".
FAMILIES = {
    "llama": Family(permuted_qk=True, full_every=0, experts=True),
    "smollm3": Family(permuted_qk=True, no_rope_every=4),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3moe": Family(qk_norm=True, experts=True),
    "phi3": Family(fused=True, full_every=0),
    "gemma2": Family(
        post_norms=True, scaled_embedding=True, activation=Activation.GELU_TANH, full_every=2, scaled_by_width=(46,)
    ),
    "gemma3": Family(
        qk_norm=True,
        post_norms=True,
        scaled_embedding=True,
        activation=Activation.GELU_TANH,
        full_every=6,
        local_theta=10_000.0,
        scaled_by_width=(62,),
    ),
    "gpt-oss": Family(
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        activation=Activation.CLAMPED_SWIGLU,
        full_every=2,
        truncate_yarn=False,
        experts=True,
        expert_bias=True,
        mlp_norm="post_attention_norm",
    ),
}


def read_spec(file: GgufFile) -> ModelSpec:
    """The model that `file` describes. Raises ModelFileError for an unknown family or an unsupported feature."""
    arch = file.text("general.architecture")
    family = FAMILIES.get(arch)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ModelFileError(file.path, f"architecture {arch!r} is not supported", f"Use one of: {known}")
    key_length = file.metadata.get(f"{arch}.attention.key_length")
    if file.metadata.get(f"{arch}.attention.value_length", key_length) != key_length:
        raise ModelFileError(file.path, "keys and values of different length are not supported", "Use another model")
    hidden, heads = file.integer(f"{arch}.embedding_length"), file.integer(f"{arch}.attention.head_count")
    if heads < 1:
        raise ModelFileError(file.path, f"{heads} attention heads", "Convert the file anew")
    head_dim = file.integer(f"{arch}.attention.key_length", hidden // heads)
    declared, num_layers = file.integer(f"{arch}.context_length"), file.integer(f"{arch}.block_count")
    try:
        checked_depth(num_layers)
        window, windowed = _windows(file, arch, family, num_layers, declared)
        moe = _experts(file, arch, family)
        theta = file.number(f"{arch}.rope.freq_base", 10_000.0)
        rotary_dim = file.integer(f"{arch}.rope.dimension_count", head_dim)
        scaling = _rope_scaling(file, arch, family, rotary_dim)
        local_theta = None
        if family.local_theta is not None:
            local_theta = file.number(f"{arch}.rope.freq_base_swa", family.local_theta)
        return ModelSpec(
            architecture=arch,
            layers=plan_layers(
                RopeSpec(theta, rotary_dim, scaling),
                windowed,
                window,
                local_rope=None if local_theta is None else RopeSpec(local_theta, rotary_dim),
                without_rope=repeating(num_layers, family.no_rope_every),
                experts=[moe is not None] * num_layers,
            ),
            hidden_size=hidden,
            intermediate_size=file.integer(
                f"{arch}.feed_forward_length", moe.intermediate_size if moe is not None else None
            ),
            num_heads=heads,
            num_kv_heads=file.integer(f"{arch}.attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab_size=_vocab_size(file, arch),
            max_position=context_length(declared, scaling),
            norm_eps=file.number(f"{arch}.attention.layer_norm_rms_epsilon"),
            tied_embeddings="output.weight" not in file.tensors,
            activation=family.activation,
            qkv_bias=family.qkv_bias,
            o_bias=family.o_bias,
            qk_norm=family.qk_norm,
            post_norms=family.post_norms,
            sinks=family.sinks,
            embedding_scale=hidden**0.5 if family.scaled_embedding else 1.0,
            attention_scale=(hidden / heads) ** -0.5 if num_layers in family.scaled_by_width else None,
            attention_softcap=file.number(f"{arch}.attn_logit_softcapping", 0.0),
            logit_softcap=file.number(f"{arch}.final_logit_softcapping", 0.0),
            moe=moe,
        )
    except ValueError as error:
        raise ModelFileError(file.path, str(error), "Convert the file anew") from error


def _windows(file: GgufFile, arch: str, family: Family, num_layers: int, context: int) -> tuple[int, list[bool]]:
    """The window, and which layers have it. A window as long as the context is none."""
    window = file.integer(f"{arch}.attention.sliding_window", 0)
    if not 0 < window < context:
        return 0, [False] * num_layers
    pattern = file.metadata.get(f"{arch}.attention.sliding_window_pattern", family.full_every)
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise ModelFileError(
                file.path, f"{len(pattern)} entries say which of {num_layers} layers have a window", "Convert it anew"
            )
        return window, [bool(entry) for entry in pattern]
    if not isinstance(pattern, int):
        raise ModelFileError(
            file.path, f"sliding-window attention is not supported for {arch!r}", "Use a model without it"
        )
    return window, [not full for full in repeating(num_layers, pattern)]


def _rope_scaling(file: GgufFile, arch: str, family: Family, rotary_dim: int) -> RopeScaling | None:
    key = f"{arch}.rope.scaling."
    kind = file.text(key + "type", "none")
    factor = file.number(key + "factor", 1.0)
    if "rope_factors_long.weight" in file.tensors:
        short, long = (_floats(file, f"rope_factors_{name}.weight", rotary_dim // 2) for name in ("short", "long"))
        trained = file.integer(key + "original_context_length")
        return LongRopeScaling(short, long, trained, file.number(key + "attn_factor", 1.0))
    if "rope_freqs.weight" in file.tensors:
        return FactorScaling(_floats(file, "rope_freqs.weight", rotary_dim // 2))
    match kind:
        case "none":
            return None
        case "linear":
            return LinearScaling(factor)
        case "yarn":
            return YarnScaling(
                factor,
                file.integer(key + "original_context_length"),
                file.number(key + "attn_factor", 1.0) * yarn_attention_factor(factor),
                file.number(key + "yarn_beta_fast", 32.0),
                file.number(key + "yarn_beta_slow", 1.0),
                family.truncate_yarn,
            )
    raise ModelFileError(file.path, f"rope scaling {kind!r} is not supported", "Use a model without it")


def _experts(file: GgufFile, arch: str, family: Family) -> MoeSpec | None:
    count = file.integer(f"{arch}.expert_count", 0)
    if not count:
        return None
    if not family.experts:
        raise ModelFileError(file.path, f"mixtures of experts are not supported for {arch!r}", "Use a dense model")
    return MoeSpec(
        num_experts=count,
        top_k=file.integer(f"{arch}.expert_used_count"),
        intermediate_size=_expert_width(file, arch),
        renormalise=True,
        bias=family.expert_bias,
    )


def _expert_width(file: GgufFile, arch: str) -> int:
    key = f"{arch}.expert_feed_forward_length"
    return file.integer(key if key in file.metadata else f"{arch}.feed_forward_length")


def _floats(file: GgufFile, name: str, size: int) -> tuple[float, ...]:
    return tuple(float(value) for value in file.tensor(name, (size,)).dequantize())


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

    def score(self, labels: int) -> FloatArray:
        raise ModelFileError(self._file.path, f"a head of {labels} scores is not read from GGUF", "Use the folder")

    def layers(self) -> Iterator[LayerTensors]:
        for index in range(self.spec.num_layers):
            yield self.layer(index)

    def matrices(self, *, output: bool = True) -> Iterator[list[TensorInfo]]:
        """The headers of the matrices that products are made of, `output` last; those of a list share one product."""
        qkv, gate_up = self._names()
        for index, layer in enumerate(self.spec.layers):
            prefix = f"blk.{index}."
            yield [self._matrix(prefix + name) for name in qkv]
            yield [self._matrix(prefix + "attn_output.weight")]
            if layer.experts and self.spec.moe is not None:
                one = [self._expert_headers(prefix, names) for names in (gate_up, ["ffn_down.weight"])]
                yield from one * self.spec.moe.num_experts
            else:
                yield [self._matrix(prefix + name) for name in gate_up]
                yield [self._matrix(prefix + "ffn_down.weight")]
        if output:
            yield [self._matrix("token_embd.weight" if self.spec.tied_embeddings else "output.weight")]

    def _expert_headers(self, prefix: str, names: list[str]) -> list[TensorInfo]:
        """Of one expert; those of all lie in one tensor."""
        stacks = [self._matrix(prefix + name.replace(".weight", "_exps.weight"), dimensions=3) for name in names]
        return [replace(s, shape=s.shape[1:], num_bytes=s.num_bytes // s.shape[0]) for s in stacks]

    def _names(self) -> tuple[list[str], list[str]]:
        """What holds Q, K and V, and gate and up."""
        if self._family.fused:
            return ["attn_qkv.weight"], ["ffn_up.weight"]
        return [f"attn_{part}.weight" for part in "qkv"], ["ffn_gate.weight", "ffn_up.weight"]

    def _matrix(self, name: str, dimensions: int = 2) -> TensorInfo:
        info = self._file.info(name)
        if len(info.shape) != dimensions:
            raise ModelFileError(
                self._file.path,
                f"tensor {name!r} has shape {list(info.shape)}, not {dimensions} dimensions",
                "Convert the file anew",
            )
        return info

    def layer(self, index: int) -> LayerTensors:
        spec, file, prefix = self.spec, self._file, f"blk.{index}."
        hidden = spec.hidden_size

        def norm(name: str, size: int, present: bool) -> FloatArray | None:
            return self._vector(f"{prefix}{name}.weight", size) if present else None

        bias = None
        if spec.qkv_bias:
            sizes = {"q": spec.q_size, "k": spec.kv_size, "v": spec.kv_size}
            bias = np.concatenate([self._vector(f"{prefix}attn_{part}.bias", size) for part, size in sizes.items()])
        return LayerTensors(
            attention_norm=self._vector(prefix + "attn_norm.weight", hidden),
            qkv=self._qkv(prefix),
            qkv_bias=bias,
            q_norm=norm("attn_q_norm", spec.head_dim, spec.qk_norm),
            k_norm=norm("attn_k_norm", spec.head_dim, spec.qk_norm),
            sinks=norm("attn_sinks", spec.num_heads, spec.sinks),
            attention_output=file.tensor(prefix + "attn_output.weight", (hidden, spec.q_size)),
            attention_output_bias=self._vector(prefix + "attn_output.bias", hidden) if spec.o_bias else None,
            post_attention_norm=norm("post_attention_norm", hidden, spec.post_norms),
            mlp_norm=self._vector(f"{prefix}{self._family.mlp_norm}.weight", hidden),
            mlp=self._experts(prefix) if spec.layers[index].experts else self._network(prefix),
            post_mlp_norm=norm("post_ffw_norm", hidden, spec.post_norms),
        )

    def _qkv(self, prefix: str) -> list[BlockTensor]:
        spec, hidden = self.spec, self.spec.hidden_size
        if self._family.fused:
            return [self._file.tensor(prefix + "attn_qkv.weight", (spec.q_size + 2 * spec.kv_size, hidden))]
        q = self._rotated(prefix + "attn_q.weight", spec.num_heads)
        k = self._rotated(prefix + "attn_k.weight", spec.num_kv_heads)
        return [q, k, self._file.tensor(prefix + "attn_v.weight", (spec.kv_size, hidden))]

    def _network(self, prefix: str) -> NetworkTensors:
        file, hidden, inner = self._file, self.spec.hidden_size, self.spec.intermediate_size
        names = self._names()[1]
        gate_up = [file.tensor(prefix + name, (2 * inner // len(names), hidden)) for name in names]
        return NetworkTensors(gate_up, file.tensor(prefix + "ffn_down.weight", (hidden, inner)))

    def _experts(self, prefix: str) -> ExpertTensors:
        file, hidden, moe = self._file, self.spec.hidden_size, self.spec.moe
        assert moe is not None  # a layer has experts only where the spec has them
        inner, count = moe.intermediate_size, moe.num_experts
        gate, up = (file.tensor(f"{prefix}ffn_{part}_exps.weight", (count, inner, hidden)) for part in ("gate", "up"))
        down = file.tensor(prefix + "ffn_down_exps.weight", (count, hidden, inner))
        biases: list[tuple[FloatArray, FloatArray] | tuple[None, None]] = [(None, None)] * count
        if moe.bias:
            parts = [file.tensor(f"{prefix}ffn_{part}_exps.bias", (count, inner)) for part in ("gate", "up")]
            gate_up_bias = np.concatenate([part.dequantize() for part in parts], axis=1)
            biases = list(
                zip(gate_up_bias, file.tensor(prefix + "ffn_down_exps.bias", (count, hidden)).dequantize(), strict=True)
            )
        return ExpertTensors(
            router=file.tensor(prefix + "ffn_gate_inp.weight", (count, hidden)).dequantize(),
            router_bias=self._vector(prefix + "ffn_gate_inp.bias", count) if moe.bias else None,
            experts=[
                NetworkTensors(
                    [part.rows(number * inner, (number + 1) * inner) for part in (gate, up)],
                    down.rows(number * hidden, (number + 1) * hidden),
                    *biases[number],
                )
                for number in range(count)
            ],
        )

    def _rotated(self, name: str, num_heads: int) -> BlockTensor:
        tensor = self._file.tensor(name, (num_heads * self.spec.head_dim, self.spec.hidden_size))
        if not self._family.permuted_qk:
            return tensor
        return tensor.take_rows(undo_permutation(num_heads, self.spec.head_dim))

    def _vector(self, name: str, size: int) -> FloatArray:
        return self._file.tensor(name, (size,)).dequantize()
