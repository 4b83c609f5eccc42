"""All blocks of a decoder in one call of the compiled kernels: `tl_blocks` in `engine/kernels/cpu_decoder.c`.

For steps in which the compiled kernels do everything: float32 activations and packed matrices that serve so many
tokens. The other steps go the decoder's own way. Both make the same calls in the same order, so a token's bits do not
depend on the way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.layers import native
from engine.layers.attention_cpu import CpuAttention
from engine.layers.attention_native import AttentionArguments, NativeAttention
from engine.layers.linear import Linear, SplitLinear
from engine.layers.linear_native import NativePackedLinear
from engine.layers.mlp import GatedMlp
from engine.models.spec import ModelSpec

if TYPE_CHECKING:
    from engine.layers.attention import AttentionBackend
    from engine.models.decoder import Layer

_LANES = 16
# Of a `Layer`, under the same names here and in C. Any may be missing but the norms before attention and MLP.
_VECTORS = (
    "attention_norm",
    "mlp_norm",
    "post_attention_norm",
    "post_mlp_norm",
    "q_norm",
    "k_norm",
    "cos_sin",
    "sinks",
)


class _Matrix(ctypes.Structure):
    """`matrix` in cpu_decoder.c."""

    _fields_ = (
        ("w", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out_features", ctypes.c_long),
        ("in_features", ctypes.c_long),
        ("bits", ctypes.c_long),
    )


class _Layer(ctypes.Structure):
    """`layer` in cpu_decoder.c."""

    _fields_ = (
        ("qkv", _Matrix),
        ("attention_output", _Matrix),
        ("gate_up", _Matrix),
        ("down", _Matrix),
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("post_attention_norm", ctypes.c_void_p),
        ("post_mlp_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("attention", ctypes.POINTER(AttentionArguments)),
        ("rotary_dim", ctypes.c_long),
    )


class _Arguments(ctypes.Structure):
    """`blocks_args` in cpu_decoder.c."""

    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("residual", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("qkv", ctypes.c_void_p),
        ("attended", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("activated", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_layers", ctypes.c_long),
        ("hidden", ctypes.c_long),
        ("intermediate", ctypes.c_long),
        ("activation", ctypes.c_long),
        ("eps", ctypes.c_float),
    )


class NativeBlocks:
    """The blocks `layers` in one call. Not thread-safe, as the attention whose arguments it shares."""

    def __init__(
        self,
        library: ctypes.CDLL,
        spec: ModelSpec,
        layers: Sequence[Layer],
        packed: Sequence[Sequence[NativePackedLinear]],
        kernel: NativeAttention,
        max_tokens: int,
    ) -> None:
        """`packed`: per layer the matrices qkv, attention_output, gate_up and down; they serve up to `max_tokens`."""
        self._call = library.tl_blocks
        self._kernel = kernel
        self._max_tokens = max_tokens
        self._keep = (layers, packed)  # whose memory the pointers below point to
        self._layers = (_Layer * len(layers))()
        for index, (target, layer, matrices) in enumerate(zip(self._layers, layers, packed, strict=True)):
            for name, matrix in zip(("qkv", "attention_output", "gate_up", "down"), matrices, strict=True):
                setattr(target, name, _Matrix(*matrix.pointers, matrix.out_features, matrix.in_features, matrix.bits))
            for name in _VECTORS:
                vector: torch.Tensor | None = getattr(layer, name)
                setattr(target, name, None if vector is None else vector.data_ptr())
            target.rotary_dim = 0 if layer.cos_sin is None else layer.cos_sin.shape[1]
            target.k_cache, target.v_cache = kernel.layer_pointers[index]
            target.attention = ctypes.pointer(kernel.layer_arguments[index])
        self._arguments = _Arguments(
            layers=self._layers,
            num_layers=len(layers),
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            activation=native.ACTIVATIONS[spec.activation],
            eps=spec.norm_eps,
        )
        widest = max(matrix.in_features for matrix in packed[0])
        # Bytes per token, in the order in which `_reserve` lays them out.
        self._widths = {
            "delta": 4 * spec.hidden_size,
            "x": 4 * spec.hidden_size,
            "qkv": 4 * (spec.q_size + 2 * spec.kv_size),
            "attended": 4 * spec.q_size,
            "gate_up": 8 * spec.intermediate_size,
            "activated": 4 * spec.intermediate_size,
            "blocks": library.tl_x_block_bytes() * (widest // 32),
        }
        self._hidden = spec.hidden_size
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._delta = torch.empty(0, spec.hidden_size)

    def serves(self, tokens: int) -> bool:
        """Whether a step of `tokens` tokens can go this way."""
        return tokens <= self._max_tokens

    def __call__(
        self, residual: torch.Tensor, positions: torch.Tensor, first: int = 0, end: int | None = None
    ) -> torch.Tensor:
        """Run the blocks from `first` to before `end`. residual: float32 `[tokens, hidden]`, what goes in, changed in
        place to the sum of what the blocks yield without the last one's MLP; that is returned, valid until the next
        call."""
        tokens = residual.shape[0]
        if len(self._delta) < tokens:
            self._reserve(tokens)
        arguments, kernel = self._arguments, self._kernel
        arguments.residual, arguments.positions = residual.data_ptr(), positions.data_ptr()
        arguments.slots = kernel.slots_pointer
        arguments.layers = ctypes.pointer(self._layers[first])
        arguments.num_layers = (len(self._layers) if end is None else end) - first
        self._call(ctypes.addressof(arguments), tokens)
        return self._delta[:tokens]

    def _reserve(self, tokens: int) -> None:
        """Scratch for steps of up to `tokens` tokens, every part on a cache line of its own."""
        sizes = {name: -(-width * tokens // 64) * 64 for name, width in self._widths.items()}
        self._scratch = torch.empty(sum(sizes.values()), dtype=torch.uint8)
        at = 0
        for name, size in sizes.items():
            setattr(self._arguments, name, self._scratch.data_ptr() + at)
            at += size
        self._delta = self._scratch[: 4 * tokens * self._hidden].view(torch.float32).view(tokens, self._hidden)


def build_blocks(
    spec: ModelSpec, layers: Sequence[Layer], attention: AttentionBackend, dtype: torch.dtype
) -> NativeBlocks | None:
    """The one call for these blocks, or None where a part of them is not the compiled kernels'.

    They know neither experts nor capped scores, and no rows that are not whole vectors.
    """
    if dtype != torch.float32 or not isinstance(attention, CpuAttention) or attention.kernel is None:
        return None
    tables = [layer.cos_sin for layer in layers if layer.cos_sin is not None]
    if spec.hidden_size % _LANES or spec.intermediate_size % _LANES or any(t.shape[1] % (2 * _LANES) for t in tables):
        return None
    library = native.library()
    if library is None:
        return None
    packed: list[list[NativePackedLinear]] = []
    limits = [attention.config.max_num_batched_tokens]
    for layer in layers:
        if not isinstance(layer.mlp, GatedMlp):
            return None
        linears = (layer.qkv, layer.attention_output, layer.mlp.gate_up, layer.mlp.down)
        matrices = [_packed(linear) for linear in linears]
        limits += [limit for _, limit in matrices if limit is not None]
        packed.append([matrix for matrix, _ in matrices if matrix is not None])
        if len(packed[-1]) < len(matrices):
            return None
    return NativeBlocks(library, spec, layers, packed, attention.kernel, min(limits))


def _packed(linear: Linear) -> tuple[NativePackedLinear | None, int | None]:
    """The packed product in `linear`, if any, and the number of rows up to which it is to be used (None: any)."""
    if isinstance(linear, SplitLinear) and isinstance(linear.few, NativePackedLinear):
        return linear.few, linear.limit
    return (linear, None) if isinstance(linear, NativePackedLinear) else (None, None)
