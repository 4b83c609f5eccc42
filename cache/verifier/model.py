"""The verifier: a logistic regression over a candidate's features, read from JSON.

The file holds numbers only, so the process that serves needs none of the libraries that fitted them. `prior.json`,
which is shipped, is where every promise starts; `cache/promise` moves it towards what is learned from the traffic.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import msgspec

from cache.verifier.features import FEATURES

# Spreads from the mean: what lies farther out was hardly ever seen, and a straight line knows nothing of it.
_EDGE = 5.0
PRIOR_FILE = Path(__file__).with_name("prior.json")


class UnusableVerifier(ValueError):
    """The file is not a verifier for these features; the message says what differs."""


class Verifier(msgspec.Struct, frozen=True):
    """`logit = offset + slope * (intercept + sum of coefficients[i] * z[i])`, `z[i] = (x[i] - means[i]) / scales[i]`.

    Attributes:
        features: names, in the order of `features.FEATURES`.
        slope, offset: calibration on questions that the coefficients have not seen (Platt 1999); 1 and 0 for none.
        version: changes with the meaning of a feature; what was learned under another one is not carried over.
    """

    version: str
    features: tuple[str, ...]
    means: tuple[float, ...]
    scales: tuple[float, ...]
    coefficients: tuple[float, ...]
    intercept: float
    slope: float = 1.0
    offset: float = 0.0

    def standardised(self, features: tuple[float, ...]) -> list[float]:
        """Features in units of their spread over the training data; what lies far outside counts as its edge."""
        return [
            min(max((x - mean) / scale, -_EDGE), _EDGE)
            for x, mean, scale in zip(features, self.means, self.scales, strict=True)
        ]

    def logit(self, features: tuple[float, ...]) -> float:
        """Log-odds that the candidate's answer is right."""
        weighed = sum(map(float.__mul__, self.standardised(features), self.coefficients))
        return self.offset + self.slope * (self.intercept + weighed)


def probability(logit: float) -> float:
    """The chance that belongs to log-odds, without overflow."""
    return 1.0 / (1.0 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1.0 + math.exp(logit))


def read(path: Path) -> Verifier:
    """Read a verifier.

    Raises:
        UnusableVerifier: it cannot be read, or is of other features or not finite.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Verifier)
    except (OSError, msgspec.DecodeError) as error:
        raise UnusableVerifier(f"{path} is no verifier: {error}") from error
    if found.features != FEATURES:
        differ = sorted(set(found.features).symmetric_difference(FEATURES)) or ["their order"]
        raise UnusableVerifier(f"{path} weighs other features ({', '.join(differ)}): train it again")
    numbers = (*found.means, *found.scales, *found.coefficients, found.intercept, found.slope, found.offset)
    if len(numbers) != 3 * len(FEATURES) + 3 or not all(map(math.isfinite, numbers)) or min(found.scales) <= 0:
        raise UnusableVerifier(f"{path} lacks numbers, or has some that are not finite")
    return found


@cache
def prior() -> Verifier:
    """The shipped verifier."""
    return read(PRIOR_FILE)
