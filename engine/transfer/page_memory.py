"""The pages of an engine's own KV cache, as bytes: read and written between two steps, on the engine's loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

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
        layers, two, num_pages, *shape = kv_cache.shape
        self._pages = kv_cache.view(layers * two, num_pages, *shape)
        self.page_bytes = kv_cache.nbytes // num_pages
        self.layout = f"{str(kv_cache.dtype).removeprefix('torch.')} {[layers, two, *shape]}"

    def read(self, pages: Sequence[int]) -> list[bytes]:
        import torch

        # One gather and one copy from the device, however many pages.
        index = torch.tensor(pages, device=self._pages.device)
        chosen = self._pages.index_select(1, index).transpose(0, 1).contiguous().cpu()
        return [page.view(torch.uint8).numpy().tobytes() for page in chosen]

    def write(self, pages: Sequence[int], contents: Sequence[memoryview]) -> None:
        import torch

        shape = (len(pages), self._pages.shape[0], *self._pages.shape[2:])
        joined = torch.frombuffer(bytearray(b"".join(contents)), dtype=self._pages.dtype).view(shape)
        index = torch.tensor(pages, device=self._pages.device)
        self._pages.index_copy_(1, index, joined.to(self._pages.device).transpose(0, 1))
