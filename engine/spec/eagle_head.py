"""The network of an EAGLE-3 head (arXiv 2503.01840): its weights, its pages, and what it keeps of the model's states.

    fused[i] = fc(the model's states at position i before three of its layers)
    entry j: attention and network over (embedding of token j, fused[j - 1]); it foresees token j + 1
    beyond the text: fused[j - 1] is what entry j - 1 itself has yielded, before the last norm

Entry `j` lies in slot `j` of the request's pages and follows, as the model's own keys and values there, from the tokens
up to `j` alone. So the head's pages have the numbers of the model's, and whoever finds, shares or copies one of those
has the head's with it. Beside each page lies the fused state of the last position computed in it, which the next entry
needs. Entry 0 would need a state before the text; there is none, and no entry sees that slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.layers.linear import LinearPolicy, build_linear, decode
from engine.layers.mlp import build_mlp
from engine.layers.ops import BlockOps
from engine.loader.eagle3 import HeadFiles
from engine.models.rotary import rotary_table
from engine.models.tensors import NetworkTensors

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of one text to be computed, at slots `first`, `first + 1`, … (1 at least), one for each of `tokens`.

    `pages`: of the text, up to the last of these slots.
    """

    tokens: Sequence[int]
    first: int
    pages: Sequence[int]

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)


class EagleHead:
    """One head on one device. Not thread-safe."""

    def __init__(
        self,
        files: HeadFiles,
        policy: LinearPolicy,
        ops: BlockOps,
        embedding: torch.Tensor,
        *,
        num_blocks: int,
        block_size: int,
        max_position: int,
    ) -> None:
        """`embedding`: the model's, `[vocabulary, hidden]`, used where the files bring none. `num_blocks` pages of
        `block_size` slots, as the model has them."""
        self.spec = files.spec
        self._ops = ops
        self._device, self._dtype = policy.device, policy.dtype
        self.block_size = block_size
        layer = self.spec.layer
        hidden = layer.hidden_size
        own = files.embedding()
        self._embedding = embedding if own is None else decode([own], policy.dtype).to(policy.device)
        sizes = {"q_proj": layer.q_size, "k_proj": layer.kv_size, "v_proj": layer.kv_size}
        matrices = [files.layer_matrix(f"self_attn.{name}", rows, 2 * hidden) for name, rows in sizes.items()]
        self._fuse = build_linear([files.fuse()], policy)
        self._qkv = build_linear(matrices, policy)
        self._attention_output = build_linear([files.layer_matrix("self_attn.o_proj", hidden, layer.q_size)], policy)
        inner = layer.intermediate_size
        gate_up = [files.layer_matrix(f"mlp.{name}", inner, hidden) for name in ("gate_proj", "up_proj")]
        network = NetworkTensors(gate_up, files.layer_matrix("mlp.down_proj", hidden, inner))
        self._mlp = build_mlp(network, policy, layer.activation)
        self._output = build_linear([files.output()], policy, out_dtype=torch.float32)
        self._tokens = torch.from_numpy(files.tokens()).to(policy.device)
        self._embedding_norm = self._vector(files.layer_norm("input_layernorm"))
        self._state_norm = self._vector(files.layer_norm("hidden_norm"))
        self._mlp_norm = self._vector(files.layer_norm("post_attention_layernorm"))
        self._final_norm = self._vector(files.final_norm())
        [rope] = layer.ropes
        self._cos_sin = rotary_table(rope, max_position).to(policy.device)
        shape = (2, num_blocks * block_size, layer.num_kv_heads, layer.head_dim)
        self.kv = torch.zeros(shape, dtype=policy.dtype, device=policy.device)
        self.last_fused = torch.zeros(num_blocks, hidden, dtype=policy.dtype, device=policy.device)

    def _vector(self, values: npt.NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def _index(self, values: Sequence[int] | LongArray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self._device)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """states: `[tokens, 3 * target hidden]`, what enters the three layers. Returns `[tokens, hidden]`."""
        return self._fuse(states.to(self._dtype))

    def copy_pages(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """As the model's pages are copied: all sources are read before any page is written. int64 `[copies]` both."""
        pages = self.kv.view(2, -1, self.block_size, *self.kv.shape[2:])
        pages.index_copy_(1, targets, pages.index_select(1, sources))
        self.last_fused.index_copy_(0, targets, self.last_fused.index_select(0, sources))

    def forward(self, entries: Sequence[Entries], fused: torch.Tensor) -> torch.Tensor:
        """Compute entries; fused: `[tokens, hidden]`, of the position before each, laid end to end.

        Returns `[tokens, hidden]`: what each yields before the last norm, in place of a fused state for the next.
        """
        layer, ops, eps = self.spec.layer, self._ops, self.spec.layer.norm_eps
        slots = [np.arange(one.first, one.end) for one in entries]
        embedded = self._embedding.index_select(0, self._index([token for one in entries for token in one.tokens]))
        states = ops.rms_norm(fused, self._state_norm, eps)
        residual = (states if self.spec.norm_before_residual else fused).float().clone()
        x = torch.cat([ops.rms_norm(embedded, self._embedding_norm, eps), states], dim=-1)
        q, k, v = self._qkv(x).split_with_sizes((layer.q_size, layer.kv_size, layer.kv_size), dim=-1)
        count = len(x)
        q = q.reshape(count, layer.num_heads, layer.head_dim)
        k = k.reshape(count, layer.num_kv_heads, layer.head_dim)
        positions = self._index(np.concatenate(slots) - 1)  # in training, the place of the state
        q, k = ops.rotary(q, k, self._cos_sin, positions)
        written = self._index(np.concatenate([self._places(one, at) for one, at in zip(entries, slots, strict=True)]))
        self.kv[0].index_copy_(0, written, k)
        self.kv[1].index_copy_(0, written, v.reshape(k.shape))
        delta = self._attention_output(self._attend(entries, q).view(count, layer.q_size))
        delta = self._mlp(ops.add_rms_norm(delta, residual, self._mlp_norm, eps), ops)
        return residual.add_(delta).to(self._dtype)

    def _places(self, entries: Entries, slots: LongArray) -> LongArray:
        """Where slots of a text lie in all pages laid end to end."""
        size = self.block_size
        places: LongArray = np.asarray(entries.pages, dtype=np.int64)[slots // size] * size + slots % size
        return places

    def _attend(self, entries: Sequence[Entries], q: torch.Tensor) -> torch.Tensor:
        """Every entry over all of its text from slot 1 to itself. q: `[tokens, heads, head_dim]`, as what is returned.

        Texts are gathered one by one: this is one layer, and its drafts one token of each.
        """
        out, start = torch.empty_like(q), 0
        for one in entries:
            stop = start + len(one.tokens)
            places = self._index(self._places(one, np.arange(1, one.end)))
            keys, values = (half.index_select(0, places).transpose(0, 1).unsqueeze(0) for half in self.kv)
            mask = None
            if len(one.tokens) > 1:
                last = torch.arange(one.first, one.end, device=q.device)[:, None]
                mask = torch.arange(1, one.end, device=q.device) <= last
            attended = torch.nn.functional.scaled_dot_product_attention(
                q[start:stop].transpose(0, 1).unsqueeze(0),
                keys,
                values,
                attn_mask=mask,
                scale=self.spec.layer.score_scale,
                enable_gqa=self.spec.layer.num_heads != self.spec.layer.num_kv_heads,
            )
            out[start:stop] = attended.squeeze(0).transpose(0, 1)
            start = stop
        return out

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 `[rows, vocabulary of the model]` of what `forward` yields; minus infinity where it has no word."""
        known = self._output(self._ops.rms_norm(states, self._final_norm, self.spec.layer.norm_eps)).float()
        logits = torch.full((len(states), self.spec.layer.vocab_size), -torch.inf, device=self._device)
        logits[:, self._tokens] = known
        return logits

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and pages as held here."""
        linears = (self._fuse, self._qkv, self._attention_output, self._mlp, self._output)
        own = self._embedding.nbytes if self.spec.own_embedding else 0
        return sum(linear.num_bytes for linear in linears) + own + self.kv.nbytes + self.last_fused.nbytes
