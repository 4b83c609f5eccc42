"""The linear model behind the classifier: weights of hashed terms, and of numbers, among them those of vectors.

One output for each kind, and one for complexity. Terms are stored in 8 bits; all else is small. Read next: `task.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

_FIELDS = ("terms", "scale", "numbers", "bias", "temperature")


@dataclass(frozen=True, slots=True)
class Linear:
    """Trained parameters; D hashed terms, N numbers, K kinds plus one output for complexity.

    Attributes:
        terms: [D, K + 1] int8, times `scale` [K + 1] gives the weight of a term.
        numbers: [N, K + 1] float32, weights of the numeric inputs.
        bias: [K + 1] float32.
        temperature: divides the scores before the softmax, fitted on held-out data.
    """

    terms: NDArray[np.int8]
    scale: NDArray[np.float32]
    numbers: NDArray[np.float32]
    bias: NDArray[np.float32]
    temperature: float

    @classmethod
    def of(cls, file: Mapping[str, Any], prefix: str = "") -> Self:
        """What `arrays` wrote under this prefix."""
        values = {name: file[prefix + name] for name in _FIELDS}
        return cls(**{**values, "temperature": float(values["temperature"])})

    def arrays(self, prefix: str = "") -> dict[str, Any]:
        """By name, as they are stored."""
        return {prefix + name: getattr(self, name) for name in _FIELDS}

    def scores(self, rows: Sequence[int], numbers: NDArray[np.float32]) -> tuple[NDArray[np.float64], float]:
        """Scores of the kinds, divided by the temperature, and the complexity in [0, 1].

        Args:
            rows: of the terms in `terms`, each once.
            numbers: [N].
        """
        output = self.bias + numbers @ self.numbers
        if rows:
            # Each term counts 1/sqrt(n): long texts do not outweigh, and one phrase moves a long text little.
            output = output + self.terms[rows].sum(axis=0, dtype=np.int32) * self.scale / math.sqrt(len(rows))
        return output[:-1].astype(np.float64) / self.temperature, float(min(1.0, max(0.0, output[-1])))
