"""How likely an answer is right, from the log-probabilities of its tokens and a curve that was measured for its model.

    z = bias + by_logprob * (mean log-probability) + by_margin * (mean margin);  p = 1 / (1 + e^-z)

and, where many answers were measured, p is read off a rising line through `knots`, which mends what a logistic bends.

A curve is a small JSON file in `data_dir/confidence/`, written by `tierline tiers calibrate` (`calibrating.py` fits
it). The running gateway sees a new one within a second.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

import msgspec

from gateway.escalating.answers import Token

if TYPE_CHECKING:
    from backends.dispatch import Candidate
    from gateway.life import Life
    from gateway.settings import Settings

FOLDER: Final = "confidence"
_LOOK_S: Final = 1.0
_SUFFIX: Final = ".json"


class Curve(msgspec.Struct, frozen=True):
    """What was measured for a model: the curve, and how it was found.

    `examples` were asked, `right` of them answered rightly. `ece_before` is the calibration error of the tokens' own
    geometric mean probability, `ece_after` that of the curve on examples that it was not fitted to.
    """

    model: str
    bias: float
    by_logprob: float
    by_margin: float
    examples: int
    right: int
    ece_before: float
    ece_after: float
    fitted_at: str
    knots: tuple[tuple[float, float], ...] = ()

    def probability(self, tokens: Sequence[Token]) -> float:
        """Of an answer of these tokens, at least one, that it is right."""
        logprob, margin = features(tokens)
        z = self.bias + self.by_logprob * logprob + self.by_margin * margin
        return along(self.knots, 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z)))


def along(knots: Sequence[tuple[float, float]], p: float) -> float:
    """The height at `p` of the line through the knots, level beyond its ends; `p` itself where there are none."""
    if not knots:
        return p
    at = bisect.bisect_left(knots, (p, -1.0))
    if at == 0 or at == len(knots):
        return knots[min(at, len(knots) - 1)][1]
    (left, low), (right, high) = knots[at - 1], knots[at]
    return low + (high - low) * (p - left) / (right - left)


def features(tokens: Sequence[Token]) -> tuple[float, float]:
    """Mean log-probability and mean margin of an answer's tokens."""
    count = len(tokens)
    return sum(token.logprob for token in tokens) / count, sum(token.margin for token in tokens) / count


class Curves:
    """The curves of a data folder. Asking costs a look at the folder's time once a second."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / FOLDER
        self._curves: Mapping[str, Curve] = {}
        self._looked = -math.inf
        self._changed = -1

    def of(self, model: str) -> Curve | None:
        """The curve of a model, if it has one that can be read."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_S:
            self._looked = now
            changed = _changed(self._folder)
            if changed != self._changed:
                self._curves, self._changed = read(self._folder), changed
        return self._curves.get(model)


def read(folder: Path) -> dict[str, Curve]:
    """The curves of a folder by model; files that are none are passed over."""
    found: dict[str, Curve] = {}
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            curve = msgspec.json.decode(path.read_bytes(), type=Curve)
        except (OSError, msgspec.MsgspecError):
            continue
        if curve.model == unquote(path.name.removesuffix(_SUFFIX)):
            found[curve.model] = curve
    return found


def write(data_dir: Path, curve: Curve) -> Path:
    """Put a curve into its file, in place of an earlier one; a reader sees the one or the other."""
    folder = data_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{quote(curve.model, safe='')}{_SUFFIX}"
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(curve), indent=2) + b"\n")
    new.replace(path)
    return path


def uncalibrated(settings: Settings) -> dict[str, str]:
    """Chat models that report log-probabilities and have no curve, with their tiers."""
    known = read(settings.storage.data_dir / FOLDER)
    return {
        name: model.tier
        for name, model in settings.models.items()
        if model.tier is not None and name not in known and reports_logprobs(settings, name)
    }


def reports_logprobs(settings: Settings, model: str) -> bool:
    """Whether a model can be asked for the log-probabilities of its tokens."""
    return (
        "logprobs" in settings.abilities(model)
        and settings.backends[settings.models[model].backend].dialect == "openai"
    )


def asked_of(settings: Settings, life: Life, candidate: Candidate) -> dict[str, Any]:
    """The fields by which a request asks a candidate for log-probabilities that the client did not ask for."""
    asked, decision = life.asked, life.decision
    assert asked is not None
    if decision is None or decision.escalate is None or not decision.escalate.asks_confidence:
        return {}
    if wanted_by_client(asked.payload) or not reports_logprobs(settings, candidate.model):
        return {}
    return {"logprobs": 2} if asked.operation == "completions" else {"logprobs": True, "top_logprobs": 2}


def wanted_by_client(payload: Mapping[str, Any]) -> bool:
    """Whether the client's own request asks for log-probabilities; 0 does, of a text completion."""
    return payload.get("logprobs") not in (None, False)


def _changed(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return -1
