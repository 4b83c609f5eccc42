"""What a step is computed from, on the device: token ids, positions and which states are wanted, sent without waiting.

Recorded work finds them where they always are (`Staging`); on a CPU without recordings the arrays are used as they are.
A token that the step before has drawn and nobody has seen yet is taken from there, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.layers.attention import AttentionConfig, LongArray
from engine.layers.staging import Staging


@dataclass(frozen=True, slots=True)
class Awaited:
    """Tokens of this step that are still on the device. `places`: among the step's tokens; `sources`: among `drawn`."""

    places: LongArray
    sources: LongArray
    drawn: torch.Tensor  # int64


class StepInputs:
    """`token_ids`, `positions`: int64 `[tokens]`; `wanted`: int64 `[states]`, indices into the tokens. Valid from one
    `send` to the next, in the order of the device's work."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor

    def __init__(self, config: AttentionConfig, *, staged: bool) -> None:
        """`staged`: at addresses that do not change; else anywhere, without bounds."""
        most = max(config.max_num_batched_tokens, config.max_num_seqs)
        # Every token may be wanted twice: to be sampled from, and to score the prompt's next one.
        sizes = {"token_ids": most, "positions": most, "places": most, "sources": most, "wanted": 2 * most}
        self._staging = (
            Staging({n: (size, torch.int64) for n, size in sizes.items()}, config.device) if staged else None
        )
        self._device = config.device

    def recorded(self, name: str) -> torch.Tensor:
        """All of an array's place, for work that is recorded. Raises ValueError where nothing is staged."""
        if self._staging is None:
            raise ValueError("inputs that are not staged have no place of their own")
        return self._staging.on_device(name)

    def send(self, token_ids: LongArray, positions: LongArray, wanted: LongArray, awaited: Awaited | None) -> None:
        """Put a step's arrays on the device, behind the work that it has. Raises ValueError as `Staging.put`."""
        arrays = {"token_ids": token_ids, "positions": positions, "wanted": wanted}
        if awaited is not None:
            arrays |= {"places": awaited.places, "sources": awaited.sources}
        sent = self._sent(arrays)
        self.token_ids, self.positions, self.wanted = sent["token_ids"], sent["positions"], sent["wanted"]
        if awaited is not None:
            self.token_ids.index_copy_(0, sent["places"], awaited.drawn.index_select(0, sent["sources"]))

    def _sent(self, arrays: dict[str, LongArray]) -> dict[str, torch.Tensor]:
        if self._staging is None:
            return {name: torch.from_numpy(values).to(self._device) for name, values in arrays.items()}
        for name, values in arrays.items():
            self._staging.put(name, values)
        self._staging.send()
        return {name: self._staging.on_device(name)[: len(values)] for name, values in arrays.items()}


class LastDrawn:
    """The tokens of the step that was drawn last, by request: they stay on the device."""

    def __init__(self) -> None:
        self._tokens: torch.Tensor | None = None
        self._places: dict[int, int] = {}

    def keep(self, request_ids: Sequence[int], tokens: torch.Tensor) -> None:
        """tokens: int64 `[requests]`."""
        self._tokens = tokens
        self._places = {request_id: place for place, request_id in enumerate(request_ids)}

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._places

    def awaited(self, places: Sequence[int], request_ids: Sequence[int]) -> Awaited | None:
        """What is to be taken from here, for requests that are; None: nothing is."""
        if self._tokens is None or not request_ids:
            return None
        sources = [self._places[request_id] for request_id in request_ids]
        return Awaited(np.array(places, dtype=np.int64), np.array(sources, dtype=np.int64), self._tokens)
