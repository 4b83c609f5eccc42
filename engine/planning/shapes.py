"""Shapes of public models by name, for plans without a file. Sizes as in their config.json."""

from __future__ import annotations

from engine.models.rope import RopeSpec
from engine.models.spec import LayerSpec, ModelSpec, MoeSpec


def _shape(
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    context: int,
    *,
    windows: tuple[int, ...] = (0,),
    tied: bool = False,
    moe: MoeSpec | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    post_norms: bool = False,
    sinks: bool = False,
) -> ModelSpec:
    """`windows`: of the layers, repeated from the first on."""
    rope = RopeSpec(10_000.0, head_dim)  # turns nothing here: its table is the same size for every base
    return ModelSpec(
        architecture="shape",
        layers=tuple(LayerSpec(rope, windows[at % len(windows)], experts=moe is not None) for at in range(layers)),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position=context,
        norm_eps=1e-5,
        tied_embeddings=tied,
        moe=moe,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
        post_norms=post_norms,
        sinks=sinks,
    )


_GEMMA_WINDOWS = (1024, 1024, 1024, 1024, 1024, 0)  # five local layers to a global one
_GPT_OSS_WINDOWS = (128, 0)


def _gpt_oss(layers: int, experts: int) -> ModelSpec:
    moe = MoeSpec(experts, 4, 2880, renormalise=True, bias=True)
    return _shape(
        layers, 2880, 2880, 64, 8, 64, 201_088, 131_072,
        windows=_GPT_OSS_WINDOWS, moe=moe, qkv_bias=True, o_bias=True, sinks=True,
    )  # fmt: skip


SHAPES = {
    "smollm2-135m": _shape(30, 576, 1536, 9, 3, 64, 49_152, 8192, tied=True),
    "smollm2-1.7b": _shape(24, 2048, 8192, 32, 32, 64, 49_152, 8192, tied=True),
    "llama-2-7b": _shape(32, 4096, 11_008, 32, 32, 128, 32_000, 4096),
    "llama-3.2-1b": _shape(16, 2048, 8192, 32, 8, 64, 128_256, 131_072, tied=True),
    "llama-3.2-3b": _shape(28, 3072, 8192, 24, 8, 128, 128_256, 131_072, tied=True),
    "llama-3.1-8b": _shape(32, 4096, 14_336, 32, 8, 128, 128_256, 131_072),
    "llama-3.1-70b": _shape(80, 8192, 28_672, 64, 8, 128, 128_256, 131_072),
    "mistral-7b": _shape(32, 4096, 14_336, 32, 8, 128, 32_768, 32_768),
    "mixtral-8x7b": _shape(
        32, 4096, 14_336, 32, 8, 128, 32_000, 32_768, moe=MoeSpec(8, 2, 14_336, renormalise=True)
    ),
    "qwen2.5-7b": _shape(28, 3584, 18_944, 28, 4, 128, 152_064, 131_072, qkv_bias=True),
    "qwen2.5-72b": _shape(80, 8192, 29_568, 64, 8, 128, 152_064, 131_072, qkv_bias=True),
    "qwen3-8b": _shape(36, 4096, 12_288, 32, 8, 128, 151_936, 40_960, qk_norm=True),
    "qwen3-32b": _shape(64, 5120, 25_600, 64, 8, 128, 151_936, 40_960, qk_norm=True),
    "qwen3-30b-a3b": _shape(
        48, 2048, 6144, 32, 4, 128, 151_936, 40_960, qk_norm=True, moe=MoeSpec(128, 8, 768, renormalise=True)
    ),
    "gemma-3-27b": _shape(
        62, 5376, 21_504, 32, 16, 128, 262_208, 131_072,
        windows=_GEMMA_WINDOWS, tied=True, qk_norm=True, post_norms=True,
    ),
    "phi-4": _shape(40, 5120, 17_920, 40, 10, 128, 100_352, 16_384),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}  # fmt: skip
