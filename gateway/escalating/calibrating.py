"""Measure how a model's log-probabilities say that it is right: ask it examples, compare, fit its curve.

The curve is a logistic regression on two numbers of an answer, the mean log-probability of its tokens and their mean
margin; with so few parameters some forty examples do. Where there are hundreds, isotonic regression (pool adjacent
violators) bends it to what was observed. What it is worth is told on examples that it was not fitted to (five folds):
the expected calibration error (Naeini et al. 2015) in ten bins of equal width.
"""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from backends.openai import decode_answer
from gateway.escalating.answers import of_whole
from gateway.escalating.confidence import Curve, along, features

LEAST_EXAMPLES: Final = 40
LEAST_OF_EACH: Final = 5  # right and wrong answers
MOST_SAMPLES: Final = 3  # answers that are shown where too few are of one kind
_MOST_SHOWN: Final = 80  # characters of each
LEAST_TO_BEND: Final = 200  # with fewer, isotonic regression follows chance
BINS: Final = 10
FOLDS: Final = 5
_RIDGE: Final = 1.0  # on the weights of standardised features, never on the bias
_STEPS: Final = 50
THRESHOLDS: Final = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)

Match = Literal["exact", "contains"]
Floats = NDArray[np.float64]


class InvalidExamples(ValueError):
    """A line that is no example, or too few of them to measure anything."""


class Example(msgspec.Struct, frozen=True):
    """One prompt with the answers that are right."""

    messages: list[dict[str, Any]]
    expected: tuple[str, ...]


class _Line(msgspec.Struct):
    expected: str | list[str]
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None


class Observed(msgspec.Struct, frozen=True):
    """One answer: what its tokens say, whether it is right, what it was, and what was expected."""

    logprob: float
    margin: float
    right: bool
    said: str = ""
    expected: tuple[str, ...] = ()


class Measured(msgspec.Struct, frozen=True):
    """The curve, and what a threshold on it does: share of the answers that pass, and how many of those are right."""

    curve: Curve
    kept: list[dict[str, float | None]]


def read(lines: Sequence[str]) -> list[Example]:
    """Examples of JSON lines: `messages` or `prompt`, and `expected`, one text or several.

    Raises:
        InvalidExamples: names the line.
    """
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = msgspec.json.decode(line, type=_Line)
        except msgspec.MsgspecError as error:
            raise InvalidExamples(f"line {number}: {error}") from None
        messages = item.messages or ([{"role": "user", "content": item.prompt}] if item.prompt else [])
        expected = (item.expected,) if isinstance(item.expected, str) else tuple(item.expected)
        if not messages or not any(text.strip() for text in expected):
            raise InvalidExamples(
                f"line {number}: it needs 'messages' or 'prompt', and an 'expected' that says something"
            )
        found.append(Example(messages, expected))
    if len(found) < LEAST_EXAMPLES:
        raise InvalidExamples(f"{len(found)} examples; at least {LEAST_EXAMPLES} are needed to measure a curve")
    return found


def is_right(answer: str, expected: Sequence[str], match: Match) -> bool:
    """Whether an answer is one of the expected texts, or contains one; case, blanks and marks around do not matter."""
    said = _plain(answer)
    if match == "exact":
        return any(said == _plain(text) for text in expected)
    return any(f" {_plain(text)} " in f" {said} " for text in expected)


def _plain(text: str) -> str:
    kept = (" " if unicodedata.category(c)[0] in "PZC" else c for c in unicodedata.normalize("NFKC", text).casefold())
    return " ".join("".join(kept).split())


async def observe(
    url: str,
    key: str | None,
    model: str,
    examples: Sequence[Example],
    *,
    match: Match,
    max_tokens: int,
    concurrency: int,
    told: Callable[[int], None] = lambda done: None,
) -> list[Observed]:
    """Ask a gateway or an engine each example, and see whether it is right and how sure it was.

    Raises:
        InvalidExamples: the server refused, or says no log-probabilities. httpx.TransportError: it cannot be reached.
    """
    room = asyncio.Semaphore(concurrency)
    # Not from the cache of answers: what the model says, and how surely, is what is measured.
    headers = {"x-tierline-cache": "no-cache, no-store"} | ({"authorization": f"Bearer {key}"} if key else {})
    done = 0

    async def one(client: httpx.AsyncClient, example: Example) -> Observed | None:
        nonlocal done
        body = {"model": model, "messages": example.messages, "max_tokens": max_tokens, "temperature": 0}
        async with room:
            answer = await client.post("/v1/chat/completions", json={**body, "logprobs": True, "top_logprobs": 2})
        done += 1
        told(done)
        if answer.status_code != httpx.codes.OK:
            raise InvalidExamples(f"the server answered with status {answer.status_code}: {_message(answer)}")
        said = of_whole(decode_answer(answer.content))[0]
        if not said.tokens:
            return None
        right = is_right(said.text, example.expected, match)
        return Observed(*features(said.tokens), right, said.text, example.expected)

    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300) as client:
        tasks = [asyncio.create_task(one(client, example)) for example in examples]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    answered = [observed for observed in found if observed is not None]
    if len(answered) < LEAST_EXAMPLES:
        raise InvalidExamples(f"only {len(answered)} answers came with log-probabilities: none can be measured")
    return answered


def _message(answer: httpx.Response) -> str:
    try:
        error: Mapping[str, Any] = answer.json()["error"]
        return str(error["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


def _samples(observed: Sequence[Observed], right: int) -> str:
    """A line for each of a few answers of the kind there is too much of."""
    wanted = right * 2 > len(observed)
    shown = [item for item in observed if item.right == wanted and item.expected][:MOST_SAMPLES]
    return "".join(
        f"\n  expected {' or '.join(map(_shown, item.expected[:3]))}, got {_shown(item.said)}" for item in shown
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "\u2026")


def measure(model: str, observed: Sequence[Observed]) -> Measured:
    """Fit the curve of a model, and say how good it is.

    Raises:
        InvalidExamples: too few answers are right, or too few wrong.
    """
    x = np.array([(item.logprob, item.margin) for item in observed])
    y = np.array([float(item.right) for item in observed])
    right = int(y.sum())
    if min(right, len(y) - right) < LEAST_OF_EACH:
        raise InvalidExamples(
            f"{right} of {len(y)} answers are right: at least {LEAST_OF_EACH} right and {LEAST_OF_EACH} wrong ones are "
            "needed to tell them apart. Take harder or easier examples, or compare otherwise: '--match exact', which is"
            f" the default, takes the whole answer, '--match contains' looks for it inside.{_samples(observed, right)}"
        )
    bias, by_logprob, by_margin = fit(x, y)
    knots = bent(_logistic((bias, by_logprob, by_margin), x), y)
    unseen = crossed(x, y)
    curve = Curve(
        model=model,
        bias=bias,
        by_logprob=by_logprob,
        by_margin=by_margin,
        examples=len(y),
        right=right,
        ece_before=calibration_error(np.exp(x[:, 0]), y),
        ece_after=calibration_error(unseen, y),
        fitted_at=datetime.now(UTC).isoformat(timespec="seconds"),
        knots=tuple(knots),
    )
    kept: list[dict[str, float | None]] = []
    for least in THRESHOLDS:
        passing = y[unseen >= least]
        accuracy = float(passing.mean()) if len(passing) else None
        kept.append({"confidence": least, "pass": len(passing) / len(y), "right": accuracy})
    return Measured(curve, kept)


def fit(x: Floats, y: Floats) -> tuple[float, float, float]:
    """Bias and weights of a logistic regression of `y` (0 or 1) on `x` [answers, 2], by Newton's method."""
    mean, spread = x.mean(axis=0), x.std(axis=0) + 1e-9
    design = np.column_stack([np.ones(len(x)), (x - mean) / spread])
    ridge = np.diag([1e-6, _RIDGE, _RIDGE])
    weights = np.zeros(3)
    for _ in range(_STEPS):
        p = 1 / (1 + np.exp(-np.clip(design @ weights, -30, 30)))
        gradient = design.T @ (p - y) + ridge @ weights
        step = np.linalg.solve((design * (p * (1 - p))[:, None]).T @ design + ridge, gradient)
        weights = weights - step
        if np.abs(step).max() < 1e-8:
            break
    by = weights[1:] / spread
    return float(weights[0] - by @ mean), float(by[0]), float(by[1])


def crossed(x: Floats, y: Floats) -> Floats:
    """For each answer the probability by a curve that was fitted without its fold."""
    found = np.zeros(len(y))
    folds = np.random.default_rng(0).permutation(len(y)) % FOLDS
    for fold in range(FOLDS):
        seen, unseen = folds != fold, folds == fold
        fitted = fit(x[seen], y[seen])
        knots = bent(_logistic(fitted, x[seen]), y[seen])
        found[unseen] = [along(knots, p) for p in _logistic(fitted, x[unseen])]
    return found


def bent(p: Floats, y: Floats) -> list[tuple[float, float]]:
    """Knots of the rising line that fits `y` best over `p`; none where there are too few answers for it."""
    if len(y) < LEAST_TO_BEND:
        return []
    pools: list[tuple[float, float, float, int]] = []  # from, to, sum of y, and how many
    for at in np.argsort(p, kind="stable"):
        pool = (float(p[at]), float(p[at]), float(y[at]), 1)
        while pools and (pools[-1][2] / pools[-1][3] >= pool[2] / pool[3] or pools[-1][1] >= pool[0]):
            low, _, right, count = pools.pop()
            pool = (low, pool[1], right + pool[2], count + pool[3])
        pools.append(pool)
    knots = [(end, min(max(right / count, 0.01), 0.99)) for *ends, right, count in pools for end in sorted({*ends})]
    return [(float(end), height) for end, height in knots]


def _logistic(fitted: tuple[float, float, float], x: Floats) -> Floats:
    z: Floats = fitted[0] + x @ np.array(fitted[1:])
    return 1 / (1 + np.exp(-np.clip(z, -30, 30)))


def calibration_error(p: Floats, y: Floats) -> float:
    """Mean distance between what was said and what was so, over bins of equal width, by their share of the answers."""
    place = np.minimum((p * BINS).astype(int), BINS - 1)
    errors = (abs(float(p[place == b].mean() - y[place == b].mean())) * float((place == b).mean()) for b in set(place))
    return sum(errors)
