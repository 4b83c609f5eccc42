"""What a decoder-only transformer is, as data: sizes and the flags in which families differ.

One `ModelSpec` and one generic decoder serve every supported family. What differs from layer to layer stands in the
layer's own `LayerSpec`. No torch, no file format.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from engine.models.rope import RopeSpec

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
# Tables of tokens have as many entries as a file declares; no model has nearly as many.
MAX_VOCABULARY = 1 << 24


class Activation(Enum):
    """What a gated feed-forward network does with `gate` and `up`."""

    SILU = "silu"  # silu(gate) * up
    GELU_TANH = "gelu_tanh"  # gelu(gate) * up, with the tanh approximation of gelu
    # gpt-oss: gate * sigmoid(SWIGLU_ALPHA * gate) * (up + 1), gate cut at SWIGLU_LIMIT, up at both signs of it
    CLAMPED_SWIGLU = "clamped_swiglu"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer has of its own. `window`: a token attends to itself and the `window - 1` before it; 0: to all."""

    rope: RopeSpec | None  # None: no position embedding
    window: int = 0
    experts: bool = False  # a mixture of experts, `ModelSpec.moe`, in place of the one feed-forward network


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts: a router picks `top_k` of `num_experts` gated networks per token.

    The router's softmax is over all experts; with `renormalise` over those picked, which is the same as dividing their
    weights by their sum.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalise: bool
    bias: bool = False  # of the router and of every expert

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts or self.intermediate_size < 1:
            raise ValueError(f"no mixture of experts: {self}")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and flags of one model. Raises ValueError when they contradict each other."""

    architecture: str
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    tied_embeddings: bool
    activation: Activation = Activation.SILU
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm per head on q and k, before the rotary embedding
    post_norms: bool = False  # a norm after attention and one after the feed-forward network, too
    sinks: bool = False  # per head a score that takes part in every softmax and has no value
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float = 0.0  # scores become c * tanh(score / c); 0: as they are
    logit_softcap: float = 0.0
    moe: MoeSpec | None = None

    def __post_init__(self) -> None:
        sizes = (self.hidden_size, self.intermediate_size, self.num_heads, self.num_kv_heads, self.head_dim)
        if min(*sizes, len(self.layers), self.vocab_size, self.max_position) < 1:
            raise ValueError(f"every size of a model must be positive: {self}")
        if self.vocab_size > MAX_VOCABULARY:
            raise ValueError(f"a vocabulary of {self.vocab_size} tokens; a model has {MAX_VOCABULARY} at most")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly")
        if any(rope.rotary_dim > self.head_dim for rope in self.ropes):
            raise ValueError(f"a rotary embedding wider than head_dim {self.head_dim}: {self.ropes}")
        if any(layer.window < 0 for layer in self.layers):
            raise ValueError("a window of attention is a number of tokens, or 0 for none")
        if self.moe is None and any(layer.experts for layer in self.layers):
            raise ValueError("layers of experts need a `moe`")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different rotary embeddings of the layers, in order of first use."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def score_scale(self) -> float:
        """Attention scores are this times `q . k`."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def num_parameters(self) -> int:
        """Weights of all matrices, norms, biases, sinks and routers; a tied output matrix counts once."""
        hidden = self.hidden_size
        attention = hidden * (2 * self.q_size + 2 * self.kv_size)
        attention += (self.q_size + 2 * self.kv_size) * self.qkv_bias + hidden * self.o_bias
        dense, sparse = _network(hidden, self.intermediate_size, self.mlp_bias), 0
        if (moe := self.moe) is not None:
            sparse = moe.num_experts * _network(hidden, moe.intermediate_size, moe.bias)
        networks = sum(sparse if layer.experts else dense for layer in self.layers)
        tables = self.vocab_size * hidden * (1 if self.tied_embeddings else 2)
        return self.num_layers * attention + networks + tables + self.num_float32_parameters

    @property
    def num_float32_parameters(self) -> int:
        """Those that stay float32 in every precision: norms, sinks and routers."""
        norms = (4 if self.post_norms else 2) * self.hidden_size + 2 * self.head_dim * self.qk_norm
        routers = 0
        if (moe := self.moe) is not None:
            routers = sum(layer.experts for layer in self.layers) * moe.num_experts * (self.hidden_size + moe.bias)
        return self.num_layers * (norms + self.num_heads * self.sinks) + routers + self.hidden_size


def _network(hidden: int, intermediate: int, bias: bool) -> int:
    """Parameters of one gated feed-forward network."""
    return 3 * hidden * intermediate + (2 * intermediate + hidden) * bias
