"""A promise as bytes, and back: what it has learned and counted. What is not understood is refused, never guessed."""

from __future__ import annotations

import msgspec
import numpy as np

from cache.promise.fit import Array, Fit
from cache.promise.memory import ROW
from cache.promise.promise import Promise, Regime, Totals
from cache.promise.rule import Certificate, Rule

FORMAT = 1


class Unusable(ValueError):
    """The bytes are of another version of the keeper or the verifier, or damaged: the promise begins anew."""


class _Saved(msgspec.Struct, frozen=True):
    format: int
    verifier: str
    rule: Rule
    totals: Totals
    regime: Regime
    certificate: Certificate | None
    bar: float | None
    trusted_from: int
    fitted_at: int
    coefficients: list[float]
    shifts: dict[int, float]
    seen: int
    x: bytes
    rows: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Saved)


def saved(promise: Promise, verifier: str) -> bytes:
    """Everything but the tickets: a comparison that was under way is lost."""
    x, rows = promise.memory.arrays()
    return _encoder.encode(
        _Saved(
            FORMAT,
            verifier,
            promise.rule,
            promise.totals,
            promise.regime,
            promise.certificate,
            promise.bar,
            promise.trusted_from,
            promise.fitted_at,
            promise.fitted.coefficients.tolist(),
            promise.fitted.shifts,
            promise.memory.seen,
            x.tobytes(),
            rows.tobytes(),
        )
    )


def restored(data: bytes, verifier: str, prior: Array, *, keep_answers: bool) -> Promise:
    """The promise that `saved` wrote. Without `keep_answers`, what was learned of single answers is left out.

    Raises:
        Unusable: see there.
    """
    try:
        found = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise Unusable(f"not a saved promise: {error}") from error
    features = len(prior) - 1
    if (found.format, found.verifier, len(found.coefficients)) != (FORMAT, verifier, len(prior)):
        raise Unusable(f"saved for verifier {found.verifier!r} in format {found.format}, now {verifier!r}, {FORMAT}")
    rows = np.frombuffer(found.rows, dtype=ROW)
    x = np.frombuffer(found.x, dtype=np.float32)
    promise = Promise(found.rule, prior, found.regime.since)
    if x.size != features * len(rows) or len(rows) != min(found.seen, promise.memory.most):
        raise Unusable("the labels of a saved promise are damaged")
    if not keep_answers:
        rows = rows.copy()
        rows["answer"] = -1
    promise.memory.restore(found.seen, x.reshape(-1, features), rows)
    promise.totals, promise.regime, promise.certificate = found.totals, found.regime, found.certificate
    promise.bar, promise.trusted_from, promise.fitted_at = found.bar, found.trusted_from, found.fitted_at
    promise.take(Fit(np.array(found.coefficients), found.shifts if keep_answers else {}, found.bar))
    return promise
