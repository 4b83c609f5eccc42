"""Penalties for tokens that a text has had already, on the logits of many rows in one pass.

With x a token's logit, n how often the answer has it, and r, p, f the repetition, presence and frequency penalties:

    x := x / r where x > 0, else x * r     if the prompt or the answer has the token (arXiv 1909.05858, section 4.1)
    x := x - p - f * n                     if the answer has it (as the OpenAI API defines them)

The counts lie on the device, a row of the vocabulary's size per text: see `engine.sampling.token_counts`. Minus
infinity stays what it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.launch import Launch

CHUNK = 2048  # tokens of the vocabulary per program
# Of a row, float32: row of the logits, row of the counts, r, p, f.
SETTINGS = tl.constexpr(5)


@triton.jit
def penalise_kernel(
    logits_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    in_prompt_ptr: tl.tensor,
    settings_ptr: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Grid: (rows, chunks). Changes the logits in place."""
    settings = settings_ptr + tl.program_id(0) * SETTINGS
    source, text = tl.load(settings).to(tl.int64), tl.load(settings + 1).to(tl.int64)
    repetition, presence, frequency = tl.load(settings + 2), tl.load(settings + 3), tl.load(settings + 4)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    within = token < VOCAB
    count = tl.load(counts_ptr + text * VOCAB + token, mask=within, other=0)
    in_prompt = tl.load(in_prompt_ptr + text * VOCAB + token, mask=within, other=0)
    x = tl.load(logits_ptr + source * VOCAB + token, mask=within, other=0.0)
    repeated = tl.where(x > 0, x / repetition, x * repetition)
    x = tl.where((count > 0) | (in_prompt > 0), repeated, x)
    x = tl.where(count > 0, x - (presence + frequency * count.to(tl.float32)), x)
    tl.store(logits_ptr + source * VOCAB + token, x, mask=within)


def penalise_launch(
    logits: torch.Tensor, counts: torch.Tensor, in_prompt: torch.Tensor, settings: torch.Tensor
) -> Launch:
    """logits: float32 `[*, vocab]`, contiguous; counts: int32, in_prompt: uint8, both `[texts, vocab]`; settings:
    float32 `[rows, SETTINGS]`, no two rows with the same row of the logits."""
    vocab = logits.shape[1]
    return Launch(
        penalise_kernel,
        (settings.shape[0], -(-vocab // CHUNK)),
        {"logits_ptr": logits, "counts_ptr": counts, "in_prompt_ptr": in_prompt, "settings_ptr": settings},
        {"VOCAB": vocab, "CHUNK": CHUNK},
        4,
        1,
    )
