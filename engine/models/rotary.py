"""The rotary embedding's table of angles, from a `RopeSpec`.

In float32 and in the order of operations of the models' own library: at far positions the last bit of a frequency is
worth a hundredth of a turn.
"""

from __future__ import annotations

import math

import torch

from engine.models.rope import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)


def rotary_table(rope: RopeSpec, max_position: int) -> torch.Tensor:
    """float32 `[max_position, rotary_dim]`: cosines, then sines, of every position and pair.

    `max_position` is the longest context served; `DynamicScaling` and `LongRopeScaling` follow from it.
    """
    frequencies, factor = _frequencies(rope, max_position)
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * factor


def _frequencies(rope: RopeSpec, max_position: int) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair, `[rotary_dim / 2]`, and what multiplies cosines and sines."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    plain = 1.0 / rope.theta**exponents
    match rope.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor):
            return plain / factor, 1.0
        case FactorScaling(factors):
            return plain / torch.tensor(factors), 1.0
        case LongRopeScaling(short, long, trained_length, attention_factor):
            divisors = torch.tensor(long if max_position > trained_length else short)
            return 1.0 / (divisors * rope.theta**exponents), attention_factor
        case DynamicScaling(factor, trained_length):
            stretch = factor * max(max_position, trained_length) / trained_length - (factor - 1)
            base = rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
            return 1.0 / base**exponents, 1.0
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling), 1.0
        case YarnScaling() as scaling:
            return _yarn(rope, plain, scaling), scaling.attention_factor


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns = scaling.trained_length * plain / (2 * math.pi)  # of a pair within the trained context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)  # of the frequency as it was
    return (1 - share) * plain / scaling.factor + share * plain


def _yarn(rope: RopeSpec, plain: torch.Tensor, scaling: YarnScaling) -> torch.Tensor:
    def pair_turning(times: float) -> float:
        """The (fractional) pair that turns so often within the trained context: arXiv 2309.00071, section 3.2."""
        return rope.rotary_dim * math.log(scaling.trained_length / (2 * math.pi * times)) / (2 * math.log(rope.theta))

    first, last = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    width = max(last - first, 0.001)
    share = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)  # interpolated
    return plain / scaling.factor * share + plain * (1 - share)
