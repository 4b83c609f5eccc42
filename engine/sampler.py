"""From logits to tokens: the whole batch at once, every row by its own `SamplingParams`.

The order is the field's: min_tokens and logit_bias, penalties, temperature, min_p, top_k, top_p. Randomness is one
number per token, a hash of (seed, position), so that a seeded request repeats whatever runs beside it and however it
was scheduled. Log-probabilities come from the raw logits. A batch of plain greedy rows costs one argmax.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence

import numpy as np
import torch

from engine.types import RowResult, SamplingParams, StepRow, TokenLogprob

# First try at top_p: so many of the likeliest tokens usually hold the nucleus; rows where they do not sort everything.
_NUCLEUS_GUESS = 128
# Temperatures below this are taken as 0: dividing by them would overflow.
_GREEDY_BELOW = 1e-5


class Sampler:
    """Stateless but for a secret that seeds requests without a seed of their own."""

    def __init__(self, end_ids: frozenset[int]) -> None:
        """`end_ids`: the tokens that end an answer, masked while `min_tokens` is not reached."""
        self._end_ids = end_ids
        self._secret = os.urandom(16)

    def sample(self, logits: torch.Tensor, rows: Sequence[StepRow]) -> list[RowResult]:
        """One result per row. logits: float32 `[rows, vocab]`, finite, left unchanged.

        A row whose parameters do not fit the vocabulary gets an `error` and disturbs no other.
        """
        faults = [_fault(row.params, logits.shape[1]) for row in rows]
        adjusted = self._adjust(logits, rows, faults)
        tokens = adjusted.argmax(dim=-1)
        random = [i for i, row in enumerate(rows) if row.params.temperature >= _GREEDY_BELOW and faults[i] is None]
        if random:
            chosen = self._draw(adjusted, [rows[i] for i in random], random)
            tokens[torch.tensor(random, device=tokens.device)] = chosen
        ids = tokens.tolist()
        logprobs = _logprobs(logits, rows, ids)
        return [
            RowResult(row.request_id, error=fault)
            if fault is not None
            else RowResult(row.request_id, (ids[i],), (logprobs[i],) if i in logprobs else ())
            for i, (row, fault) in enumerate(zip(rows, faults, strict=True))
        ]

    def _adjust(self, logits: torch.Tensor, rows: Sequence[StepRow], faults: Sequence[str | None]) -> torch.Tensor:
        """Masks, biases and penalties; a copy only when some row asks for one."""
        adjusted = logits
        for i, row in enumerate(rows):
            if faults[i] is not None or not _adjusts(row):
                continue
            if adjusted is logits:
                adjusted = logits.clone()
            _adjust_row(adjusted[i], row, self._end_ids)
        return adjusted

    def _draw(self, logits: torch.Tensor, rows: Sequence[StepRow], index: list[int]) -> torch.Tensor:
        """Sampled tokens, int64 `[rows]`, for the rows `index` of `logits`."""
        device = logits.device

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

        params = [row.params for row in rows]
        scaled = logits[index] / column([p.temperature for p in params])
        if any(p.min_p > 0 for p in params):
            floor = scaled.amax(dim=-1, keepdim=True) + column([p.min_p for p in params]).log()
            scaled.masked_fill_(scaled < floor, -torch.inf)
        uniform = torch.tensor([self._uniform(row) for row in rows], dtype=torch.float64, device=device).unsqueeze(1)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
        plain = [i for i, p in enumerate(params) if not _truncates(p)]
        if plain:
            tokens[plain] = _invert(torch.softmax(scaled[plain], dim=-1), uniform[plain])
        ranked = [i for i, p in enumerate(params) if _truncates(p)]
        if ranked:
            tokens[ranked] = _draw_ranked(scaled[ranked], [params[i] for i in ranked], uniform[ranked])
        return tokens

    def _uniform(self, row: StepRow) -> float:
        """A number in [0, 1) fixed by the request's seed and the position of the token to come."""
        if row.params.seed is None:
            key = self._secret + struct.pack("<q", row.request_id)
        else:
            key = b"seed" + struct.pack("<Q", row.params.seed & 0xFFFF_FFFF_FFFF_FFFF)
        digest = hashlib.blake2b(struct.pack("<Q", len(row.all_token_ids)), key=key, digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) / 2.0**53


def _fault(params: SamplingParams, vocab_size: int) -> str | None:
    """Why these parameters cannot be applied to this vocabulary, or None."""
    outside = [t for t in params.logit_bias if not 0 <= t < vocab_size]
    if outside:
        return f"logit_bias names token {outside[0]}, the vocabulary has {vocab_size}"
    return None


def _truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0


def _num_generated(row: StepRow) -> int:
    return len(row.all_token_ids) - row.num_prompt_tokens


def _adjusts(row: StepRow) -> bool:
    p = row.params
    return (
        bool(p.logit_bias)
        or p.repetition_penalty != 1.0
        or p.presence_penalty != 0.0
        or p.frequency_penalty != 0.0
        or _num_generated(row) < p.min_tokens
    )


def _adjust_row(logits: torch.Tensor, row: StepRow, end_ids: frozenset[int]) -> None:
    """Change one row's logits `[vocab]` in place.

    Repetition penalty (arXiv 1909.05858, section 4.1) looks at prompt and answer; presence and frequency penalties (as
    the OpenAI API defines them) at the answer alone.
    """
    p = row.params
    if p.logit_bias:
        ids = torch.tensor(list(p.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(p.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    if _num_generated(row) < p.min_tokens:
        banned = [t for t in end_ids | p.stop_token_ids if 0 <= t < logits.shape[0]]
        logits[torch.tensor(banned, dtype=torch.int64, device=logits.device)] = -torch.inf
    if p.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.asarray(row.all_token_ids, dtype=np.int64))).to(logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if p.presence_penalty != 0.0 or p.frequency_penalty != 0.0:
        answer = np.asarray(row.all_token_ids[row.num_prompt_tokens :], dtype=np.int64)
        ids_array, counts = np.unique(answer, return_counts=True)
        penalty = p.presence_penalty + p.frequency_penalty * torch.from_numpy(counts).to(logits.device, logits.dtype)
        logits[torch.from_numpy(ids_array).to(logits.device)] -= penalty


def _invert(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The index where the cumulative distribution passes `uniform`. probs: `[rows, n]`; uniform: `[rows, 1]`, below 1.

    Summed in float64. An index of zero probability is never chosen: the search is for the first sum *above* the target,
    and the target is below the last sum.
    """
    cumulative = probs.double().cumsum(dim=-1)
    last = cumulative[:, -1:]
    target = torch.minimum(uniform * last, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=probs.shape[1] - 1)


def _draw_ranked(scaled: torch.Tensor, params: Sequence[SamplingParams], uniform: torch.Tensor) -> torch.Tensor:
    """Draw from the top_k likeliest tokens, then from the smallest set of those that holds top_p. int64 `[rows]`.

    Only as many tokens are ranked as the largest top_k needs; with top_p alone a guess is tried first.
    """
    vocab = scaled.shape[1]
    limits = [min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params]
    width = min(vocab, max(limit if limit < vocab else _NUCLEUS_GUESS for limit in limits))
    values, ids = scaled.topk(width, dim=-1)  # sorted, likeliest first
    # Probabilities are relative to what top_k leaves: all of the vocabulary where it is off.
    total = scaled.logsumexp(dim=-1, keepdim=True)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=scaled.device).unsqueeze(1)
    limit = torch.tensor(limits, device=scaled.device).unsqueeze(1)
    within = torch.arange(width, device=scaled.device) < limit
    kept = values.masked_fill(~within, -torch.inf)
    total = torch.where(limit < vocab, kept.logsumexp(dim=-1, keepdim=True), total)
    probs = (kept - total).exp().double()
    before = probs.cumsum(dim=-1) - probs
    unfinished = (limit == vocab) & (before[:, -1:] + probs[:, -1:] < top_p) & (width < vocab)
    outside = before >= top_p
    outside[:, 0] = False  # top_p = 0 keeps the likeliest
    probs.masked_fill_(outside, 0.0)
    tokens = ids.gather(1, _invert(probs, uniform).unsqueeze(1)).squeeze(1)
    for row in unfinished.squeeze(1).nonzero().squeeze(1).tolist():
        tokens[row] = _draw_nucleus(scaled[row], params[row].top_p, uniform[row])
    return tokens


def _draw_nucleus(scaled: torch.Tensor, top_p: float, uniform: torch.Tensor) -> torch.Tensor:
    """top_p over the whole vocabulary, for one row `[vocab]` whose nucleus is wide."""
    values, ids = scaled.sort(descending=True, stable=True)
    probs = values.double().softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    probs.masked_fill_(before >= top_p, 0.0)
    return ids[_invert(probs.unsqueeze(0), uniform.unsqueeze(0))].squeeze(0)


def _logprobs(logits: torch.Tensor, rows: Sequence[StepRow], ids: Sequence[int]) -> dict[int, TokenLogprob]:
    """By row index, for the rows that ask."""
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not asked:
        return {}
    raw = torch.log_softmax(logits[asked], dim=-1)
    width = min(max(rows[i].params.logprobs or 0 for i in asked), raw.shape[1])
    values, tokens = (part.tolist() for part in raw.topk(width, dim=-1))
    result = {}
    for n, i in enumerate(asked):
        count = rows[i].params.logprobs or 0
        top = tuple(zip(tokens[n][:count], values[n][:count], strict=True))
        result[i] = TokenLogprob(ids[i], float(raw[n, ids[i]]), top)
    return result
