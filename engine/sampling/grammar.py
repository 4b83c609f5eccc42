"""Grammars in the sampler: what they do not allow next becomes minus infinity, all rows of a step at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.layers.staging import upload
from engine.types import Bitmask, GrammarFailed, StepRow


def constrain(adjusted: torch.Tensor, logits: torch.Tensor, rows: Sequence[StepRow], faults: list[str | None]) -> None:
    """Mask the rows of `adjusted` that have a grammar, in place; adds to `faults`. Both float32 `[rows, vocab]`.

    A grammar that allows one token only, an end too early for `min_tokens` say, has its way over what bans that token:
    there the mask is put on the raw `logits`.
    """
    asked = [i for i, row in enumerate(rows) if row.grammar is not None and faults[i] is None]
    if not asked:
        return
    vocab = logits.shape[1]
    bits: Bitmask = np.zeros((len(asked), -(-vocab // 32)), dtype=np.int32)
    for n, i in enumerate(asked):
        grammar = rows[i].grammar
        assert grammar is not None
        try:
            grammar.fill((), bits[n : n + 1])
        except GrammarFailed as error:
            faults[i] = str(error)
    forbidden = ~unpack(upload(bits, logits.device), vocab)
    places = upload(np.array(asked, dtype=np.int64), logits.device)
    masked = adjusted.index_select(0, places).masked_fill_(forbidden, -torch.inf)
    overruled = masked.amax(dim=-1, keepdim=True) == -torch.inf
    raw = logits.index_select(0, places).masked_fill_(forbidden, -torch.inf)
    adjusted.index_copy_(0, places, torch.where(overruled, raw, masked))


def unpack(bits: torch.Tensor, vocab: int) -> torch.Tensor:
    """bool `[rows, vocab]` of packed int32 `[rows, words]`: bit `t % 32` of word `t // 32` is token `t`."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits.unsqueeze(-1) >> shifts) & 1).bool().flatten(1)[:, :vocab]
