"""What both model formats derive in the same way: the plan of a model's layers, and its context length."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.models.rope import DynamicScaling, RopeScaling, RopeSpec, YarnScaling
from engine.models.spec import LayerSpec

# No model is nearly as deep; what is beyond it is a damaged or hostile file, and must not become a list of that length.
_MAX_LAYERS = 10_000


def checked_depth(count: int) -> int:
    """A number of layers as a file declares it. Raises ValueError for one that no model has."""
    if not 1 <= count <= _MAX_LAYERS:
        raise ValueError(f"{count} layers are declared; a model has 1 to {_MAX_LAYERS}")
    return count


def repeating(count: int, every: int) -> list[bool]:
    """For each of `count` layers whether it is one of every `every`: the last of each group; 0: none."""
    return [bool(every) and (index + 1) % every == 0 for index in range(count)]


def plan_layers(
    rope: RopeSpec,
    windowed: Sequence[bool],
    window: int,
    *,
    local_rope: RopeSpec | None = None,
    without_rope: Sequence[bool] = (),
    experts: Sequence[bool] = (),
) -> tuple[LayerSpec, ...]:
    """One `LayerSpec` per entry of `windowed`.

    Layers that are windowed see `window` tokens (0: all) and turn by `local_rope` where there is one; `without_rope`
    and `experts` mark layers, empty: none.
    """
    return tuple(
        LayerSpec(
            rope=None if without_rope and without_rope[index] else local_rope if local and local_rope else rope,
            window=window if local else 0,
            experts=bool(experts) and experts[index],
        )
        for index, local in enumerate(windowed)
    )


def context_length(declared: int, scaling: RopeScaling | None) -> int:
    """The longest context of a model that declares `declared` positions: its trained length times what the scaling
    promises, where files give the trained length as the whole."""
    if isinstance(scaling, DynamicScaling | YarnScaling):
        return max(declared, round(scaling.trained_length * scaling.factor))
    return declared


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies cosines and sines by (arXiv 2309.00071, equation 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_attention_factor(factor: float, trained_length: int) -> float:
    """What LongRoPE multiplies cosines and sines by (arXiv 2402.13753, section 3.3)."""
    return math.sqrt(1 + math.log(factor) / math.log(trained_length)) if factor > 1 else 1.0
