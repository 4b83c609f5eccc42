"""What a decoder-only transformer is, as data: sizes and the flags in which families differ.

One `ModelSpec` and one generic decoder serve every supported family. No torch, no file format.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (arXiv 2104.09864), halves convention.

    Pair `i` of `rotary_dim / 2` turns by `position / linear_factor * theta ** (-2 i / rotary_dim)`, divided by the
    weights' per-frequency factors where the model has them (Llama 3's scaling arrives that way).
    """

    theta: float
    rotary_dim: int
    linear_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and flags of one model. Raises ValueError when they contradict each other."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: RopeSpec
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm per head on q and k, before the rotary embedding

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.hidden_size, self.intermediate_size, self.num_heads, self.num_kv_heads)
        if min(*sizes, self.head_dim, self.vocab_size, self.max_position) < 1:
            raise ValueError(f"every size of a model must be positive: {self}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly")
        if self.rope.rotary_dim % 2 or not 0 < self.rope.rotary_dim <= self.head_dim:
            raise ValueError(f"rotary_dim {self.rope.rotary_dim} must be even and at most head_dim {self.head_dim}")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights of all matrices and norms; a tied output matrix counts once."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        bias = (self.q_size + 2 * self.kv_size) * self.qkv_bias
        norms = 2 * self.hidden_size + 2 * self.head_dim * self.qk_norm
        block = attention + bias + norms + 3 * self.hidden_size * self.intermediate_size
        tables = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * block + tables + self.hidden_size
