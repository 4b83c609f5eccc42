"""Paged attention by Triton kernels: `AttentionBackend` on CUDA, and interpreted on a CPU in tests.

A layer is three launches: write K and V to the pages, decode rows (split over the keys and combined), longer rows.
A mixed step runs both attention kernels, since one kernel that branches between them is slower than either.
"""

from __future__ import annotations

import torch

from engine.kernels import heuristics
from engine.kernels.attn_decode import decode_launches
from engine.kernels.attn_prefill import prefill_launch
from engine.kernels.fp8_pages import Fp8Pages, page_bytes
from engine.kernels.jit_monitor import monitor
from engine.kernels.kv_write import kv_write_launch
from engine.kernels.product_table import FP8_ARCH
from engine.layers.attention import AttentionConfig, StepGeometry
from engine.layers.staging import Staging

# The interpreter has no multiprocessors: as many as let small tests split their keys.
_INTERPRETER_SMS = 4


class TritonAttention:
    """`AttentionBackend` on Triton.

    With `deterministic`, a row's result does not depend on the rows beside it: decode splits keys by a fixed size and
    longer rows take one tile whatever their number. The price is speed for short rows and scratch memory, one partial
    result (head_dim + 1 float32) per row, head and 256 keys of the longest sequence that the cache can hold.

    On CUDA the constructor compiles every kernel that serving will launch (seconds, or a disk-cache hit), so that no
    request waits for the compiler. On a CPU it needs TRITON_INTERPRET=1, set before Triton is first imported. Raises
    ValueError for a GPU, a head size or a dtype that the kernels do not serve.
    """

    def __init__(self, config: AttentionConfig, *, deterministic: bool = False) -> None:
        self.config = config
        if config.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(config.device)
            self._arch = 10 * major + minor
            self._num_sms: int = torch.cuda.get_device_properties(config.device).multi_processor_count
        else:
            from triton import knobs

            if not knobs.runtime.interpret:
                raise ValueError("Triton attention on a CPU is for tests only: set TRITON_INTERPRET=1")
            self._arch = heuristics.INTERPRETER
            self._num_sms = _INTERPRETER_SMS
        self._tiles = heuristics.attention_tiles(self._arch, config.head_dim, config.dtype)
        self._deterministic = deterministic
        self._split_rule = heuristics.SPLIT_FIXED if deterministic else heuristics.SPLIT_AT_LEAST
        # The interpreter multiplies bfloat16 wrongly.
        self._upcast = self._arch == heuristics.INTERPRETER and config.dtype == torch.bfloat16

        device = config.device
        self.kv_cache = self._empty_cache()
        tables = config.max_num_seqs * config.max_blocks_per_seq
        fields = {
            "seq_lens": (config.max_num_seqs, torch.int32),
            "query_starts": (config.max_num_seqs + 1, torch.int32),
            "slots": (config.max_num_batched_tokens, torch.int64),
            "tables": (tables, torch.int32),
        }
        self._staging = Staging(fields, device)
        self._seq_lens = self._staging.on_device("seq_lens")
        self._query_starts = self._staging.on_device("query_starts")
        self._slots = self._staging.on_device("slots")
        # Recorded steps need rows that stay where they are, however wide the step's tables are.
        self._block_tables = torch.zeros(
            config.max_num_seqs, config.max_blocks_per_seq, dtype=torch.int32, device=device
        )
        rows = self._max_partial_rows()
        self._partial = torch.empty(rows * config.head_dim, dtype=torch.float32, device=device)
        self._lse = torch.empty(rows, dtype=torch.float32, device=device)

        self._rows = self._decode_rows = self._tokens = 0
        self._max_splits = 1
        self._windows = [config.window(layer) for layer in range(config.num_layers)]
        self._prefill_tile = self._tiles.prefill
        if device.type == "cuda":
            monitor.install()
            self._warm_up()
            torch.cuda.synchronize(device)

    def _splits(self, rows: int, max_seq_len: int) -> int:
        return heuristics.decode_splits(rows, self.config.num_kv_heads, self._num_sms, max_seq_len, self._split_rule)

    def _max_partial_rows(self) -> int:
        """Partial results that the largest possible decode step writes, one per row, head and split."""
        longest = self.config.max_blocks_per_seq * self.config.block_size
        return max(
            rows * self.config.num_heads * self._splits(rows, longest)
            for rows in range(1, self.config.max_num_seqs + 1)
        )

    def begin(self, step: StepGeometry) -> None:
        self._rows, self._decode_rows, self._tokens = step.num_rows, step.num_decode_rows, step.num_tokens
        tables, staging = step.block_tables, self._staging
        staging.put("seq_lens", step.seq_lens)
        staging.put("slots", step.slots)
        staging.put("tables", tables)
        prefill_rows = self._rows - self._decode_rows
        if prefill_rows:
            staging.put("query_starts", step.query_starts[self._decode_rows :] - self._decode_rows)  # one token each
            group = self.config.num_heads // self.config.num_kv_heads
            mean_rows = (self._tokens - self._decode_rows) * group / prefill_rows
            short = mean_rows < heuristics.SHORT_PREFILL_ROWS and not self._deterministic
            self._prefill_tile = self._tiles.prefill_short if short else self._tiles.prefill
        staging.send()
        packed = staging.on_device("tables")[: tables.size].view(tables.shape)
        self._block_tables[: self._rows, : tables.shape[1]].copy_(packed)
        if self._decode_rows:
            # That of the longest row, be it one of several tokens: offering more splits than are needed changes none.
            self._max_splits = self._splits(self._decode_rows, step.max_seq_len)

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        k_pages, v_pages, kv_scales = self._write(layer, k, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        tables = self._block_tables[: self._rows]
        decode = self._decode_rows
        if decode:
            for launch in decode_launches(
                q[:decode],
                k_pages,
                v_pages,
                tables[:decode],
                self._seq_lens[:decode],
                out[:decode],
                self._partial,
                self._lse,
                scale=self.config.scale,
                window=self._windows[layer],
                softcap=self.config.softcap,
                sinks=sinks,
                max_splits=self._max_splits,
                tile=self._tiles.decode,
                split_rule=self._split_rule,
                upcast=self._upcast,
                kv_scales=kv_scales,
            ):
                launch.run()
        if decode < self._rows:
            prefill_launch(
                q[decode:],
                k_pages,
                v_pages,
                tables[decode:],
                self._query_starts[: self._rows - decode + 1],
                self._seq_lens[decode : self._rows],
                out[decode:],
                scale=self.config.scale,
                window=self._windows[layer],
                softcap=self.config.softcap,
                sinks=sinks,
                tile=self._prefill_tile,
                upcast=self._upcast,
                kv_scales=kv_scales,
            ).run()
        return out

    def _empty_cache(self) -> torch.Tensor:
        cfg = self.config
        if not cfg.fp8:
            return torch.zeros(cfg.kv_shape, dtype=cfg.dtype, device=cfg.device)
        if self._arch != heuristics.INTERPRETER and self._arch < FP8_ARCH:
            raise ValueError(
                f"a KV cache of eight-bit floats needs compute capability 8.9 (Ada) or newer, this GPU has "
                f"{self._arch / 10}: leave kv_dtype at auto"
            )
        size = page_bytes(cfg.block_size, cfg.num_kv_heads, cfg.head_dim)
        return torch.zeros(cfg.num_layers, 2, cfg.num_blocks, size, dtype=torch.uint8, device=cfg.device)

    def _write(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """Write the step's K and V; the layer's pages of both, and their scales if they have any."""
        cfg, slots, (k_raw, v_raw) = self.config, self._slots[: self._tokens], self.kv_cache[layer].unbind(0)
        if not cfg.fp8:
            kv_write_launch(k, v, k_raw, v_raw, slots).run()
            return k_raw, v_raw, None
        k_pages = Fp8Pages.of(k_raw, cfg.block_size, cfg.num_kv_heads, cfg.head_dim)
        v_pages = Fp8Pages.of(v_raw, cfg.block_size, cfg.num_kv_heads, cfg.head_dim)
        kv_write_launch(k, v, k_pages, v_pages, slots, interpreted=self._arch == heuristics.INTERPRETER).run()
        return k_pages.codes, v_pages.codes, (k_pages.scale, v_pages.scale)

    def _warm_up(self) -> None:
        """Run every kernel variant once, one row on the null page, writing nothing to it."""
        cfg = self.config
        self._rows = self._tokens = 1
        self._block_tables.zero_()
        self._seq_lens.fill_(1)
        self._slots.fill_(-1)
        self._query_starts.copy_(torch.arange(len(self._query_starts), dtype=torch.int32))
        heads, kv_heads = cfg.num_heads, cfg.num_kv_heads
        qkv = torch.zeros(1, heads + 2 * kv_heads, cfg.head_dim, dtype=cfg.dtype, device=cfg.device)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        sinks = torch.zeros(heads, device=cfg.device) if cfg.sinks else None
        for layer in {window: layer for layer, window in enumerate(self._windows)}.values():
            self._decode_rows = 1
            for max_splits in {1, min(2, len(self._lse) // heads)}:
                self._max_splits = max_splits
                self.forward(layer, q, k, v, sinks)
            self._decode_rows = 0
            for tile in (self._tiles.prefill, self._tiles.prefill_short):
                self._prefill_tile = tile
                self.forward(layer, q, k, v, sinks)
