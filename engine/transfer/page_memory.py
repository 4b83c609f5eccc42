"""The pages of an engine's own KV cache, as bytes: read and written between two steps, on the engine's loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


class PageMemory(Protocol):
    """Where pages come from and go to."""

    page_bytes: int
    layout: str  # data type and shape of a page: bytes mean the same wherever this is the same

    def read(self, pages: Sequence[int]) -> list[bytes]:
        """The content of pages."""
        ...

    def write(self, pages: Sequence[int], contents: Sequence[memoryview]) -> None:
        """Put contents of `page_bytes` each into pages."""
        ...


class TensorPages:
    """`PageMemory` over a KV cache `[layers, 2, pages, tokens, heads, head_dim]`, on any device."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        import torch

        layers, two, num_pages, *shape = kv_cache.shape
        self.page_bytes = kv_cache.nbytes // num_pages
        self.layout = f"{str(kv_cache.dtype).removeprefix('torch.')} {[layers, two, *shape]}"
        # [layers * 2, pages, bytes]: of one page, a row per layer for K and for V.
        self._rows = kv_cache.view(layers * two, num_pages, -1).view(torch.uint8)
        self._host = self._rows.numpy() if kv_cache.device.type == "cpu" else None

    def read(self, pages: Sequence[int]) -> list[bytes]:
        if self._host is not None:
            return [self._host[:, page].tobytes() for page in pages]
        import torch

        # One gather and one copy from the device, however many pages.
        index = torch.tensor(pages, device=self._rows.device)
        chosen = self._rows.index_select(1, index).transpose(0, 1).contiguous().cpu().numpy()
        return [page.tobytes() for page in chosen]

    def write(self, pages: Sequence[int], contents: Sequence[memoryview]) -> None:
        count, _, width = self._rows.shape
        if self._host is not None:
            for page, content in zip(pages, contents, strict=True):
                self._host[:, page] = np.frombuffer(content, dtype=np.uint8).reshape(count, width)
            return
        import torch

        joined = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8).view(len(pages), count, width)
        index = torch.tensor(pages, device=self._rows.device)
        self._rows.index_copy_(1, index, joined.to(self._rows.device).transpose(0, 1))
