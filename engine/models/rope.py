"""Rotary position embedding as data: which dimensions turn, how fast, and how a model was stretched past its training.

`rotary.py` turns a `RopeSpec` into a table. No torch, no file format.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every position is divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK-aware: the base grows so that a context of `factor * trained_length` turns the slowest pair no further.

    The models' own library lets the base follow each text's length. Cached keys cannot turn again, so the base is that
    of the longest context served; up to `trained_length` nothing is scaled.
    """

    factor: float
    trained_length: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): slow pairs are interpolated by `factor`, fast ones left, a ramp between.

    Pairs that turn more than `beta_fast` times within `trained_length` are fast, fewer than `beta_slow` times slow.
    `attention_factor` multiplies cosines and sines. `truncate`: the ramp begins and ends at whole pairs.
    """

    factor: float
    trained_length: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): a divisor per pair, `short` for contexts up to `trained_length`, `long` beyond.

    The models' own library chooses by each text's length. Cached keys cannot turn again, so the longest context served
    decides: serve no more than `trained_length` tokens to have the short form.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained_length: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's: pairs of a wavelength over `trained_length / low_freq_factor` are divided by `factor`, those below
    `trained_length / high_freq_factor` left, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    trained_length: int


@dataclass(frozen=True, slots=True)
class FactorScaling:
    """A divisor per pair, as GGUF files carry Llama 3's scaling."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | LongRopeScaling | Llama3Scaling | FactorScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (arXiv 2104.09864), halves convention.

    Pair `i` of `rotary_dim / 2` turns by `position * theta ** (-2 i / rotary_dim)` before `scaling`. Elements of a head
    beyond `rotary_dim` do not turn. Raises ValueError for sizes that do not fit together.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim {self.rotary_dim} must be even and positive")
        if self.theta <= 0:
            raise ValueError(f"rope theta {self.theta} must be positive")
        lists: tuple[tuple[float, ...], ...] = ()
        match self.scaling:
            case FactorScaling(factors):
                lists = (factors,)
            case LongRopeScaling(short, long):
                lists = (short, long)
            case LinearScaling(factor) | DynamicScaling(factor) | YarnScaling(factor) | Llama3Scaling(factor):
                lists = ((factor,) * (self.rotary_dim // 2),)
        for divisors in lists:
            if len(divisors) != self.rotary_dim // 2 or min(divisors) <= 0:
                raise ValueError(
                    f"rope scaling needs {self.rotary_dim // 2} positive factors, one per pair: {list(divisors)}"
                )
