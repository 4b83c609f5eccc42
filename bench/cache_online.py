"""The learning cache online: a stream whose cache grows, under a promise on the false-hit rate.

Real verifier, keeper and guards; the judge is label equality. The verifier starts from coefficients that were fitted
without the data set it is measured on. Also offline: how many hits a wrong share allows, if labels were known.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.report import Row
from cache.embedding.embedder import Refused
from cache.evaluation.prepare import TextEmbedder
from cache.evaluation.result import Summary
from cache.evaluation.stream import evaluate_stream
from cache.promise.bounds import lower_bound, upper_bound
from cache.promise.rule import PromiseMode, Rule
from cache.store.index import Vector
from cache.verifier.corpus import STREAMS, UNSEEN, Asked, clinc150_open
from cache.verifier.model import Verifier
from cache.verifier.train import Examples, examples_of, hits_within, play, train
from cache.words.asking import asked_form

PROMISES = (0.01, 0.02)
AUDIT_RATE = 0.05  # the default of a policy
# Of what the training takes: Clinc150 with its utterances that belong to no intent.
_TRAINED_ON = {"banking77": STREAMS["banking77"], "clinc150": clinc150_open}


def examples(data: Path, embedder: TextEmbedder) -> dict[str, Examples]:
    """The training examples of every data set."""
    found = {}
    for name, read in _TRAINED_ON.items():
        stream = read(data)
        found[name] = examples_of(stream, _vectors(stream, embedder))
    return found


def without(sets: dict[str, Examples], name: str) -> Verifier:
    """A verifier that has never seen a question of the data set `name`, nor of that which it is a part of."""
    return train([found for other, found in sets.items() if not name.startswith(other)])


def measure_online(data: Path, embedder: TextEmbedder, sets: dict[str, Examples], runs: int) -> Iterator[Row]:
    """Hit rate and wrong hits over a whole stream that begins with an empty cache; the variants once only.

    By the streams of `UNSEEN` nothing was chosen: neither a coefficient, nor how a bar is found.
    """
    for name, read in {**STREAMS, **UNSEEN}.items():
        stream, verifier = read(data), without(sets, name)

        def run(
            promise: float,
            mode: PromiseMode = "serve",
            runs: int = 1,
            stream: list[Asked] = stream,
            verifier: Verifier = verifier,
            **how: float,
        ) -> list[Summary]:
            rule = Rule(policy="bench", max_false_hit_rate=promise, audit_rate=AUDIT_RATE, min_audited=300, mode=mode)
            return [
                evaluate_stream(
                    random.Random(seed).sample(stream, len(stream)),
                    embedder,
                    rule=rule,
                    verifier=verifier,
                    seed=seed,
                    admit_all=bool(how.get("admit_all", True)),
                    judge_error=how.get("judge_error", 0.0),
                ).summary
                for seed in range(runs)
            ]

        for promise in PROMISES:
            setting = f"{name} promise={promise:.0%}"
            yield from _rows("tierline", f"{setting}, every request admitted", run(promise, runs=runs))
        if name in UNSEEN:
            continue
        yield from _rows("tierline", f"{name} promise=2%, with the rules of eligibility", run(0.02, admit_all=0.0))
        yield from _rows("tierline", f"{name} promise=2%, served once certified", run(0.02, "certify"))
        for error in (0.005, 0.02):
            setting = f"{name} promise=2%, judge errs in {error:.1%}"
            yield from _rows("tierline", setting, run(0.02, judge_error=error))


def _rows(system: str, setting: str, found: list[Summary]) -> Iterator[Row]:
    yield Row.of("hit_rate", system, setting, "share", [one.hit_rate or 0.0 for one in found])
    if any(one.eligible < one.requests for one in found):
        rates = [one.hit_rate_of_eligible or 0.0 for one in found]
        yield Row.of("hit_rate_of_eligible", system, setting, "share", rates)
    yield Row.of("false_hit_rate", system, setting, "share", [one.false_hit_rate or 0.0 for one in found])
    breaches = [float(one.standing.breaches) if one.standing else 0.0 for one in found]
    yield Row.of("breaches", system, setting, "number", breaches)


def measure_offline(data: Path, embedder: TextEmbedder, sets: dict[str, Examples]) -> Iterator[Row]:
    """The largest share of hits with so many of them wrong, on the last 60 % of a stream.

    Everything enters the cache under its true answer, and the best cut is chosen on what is measured: an upper bound,
    for every system alike. "In domain" is fitted on the first 40 % of the same stream.
    """
    for name, read in STREAMS.items():
        stream = read(data)
        played = play(random.Random(0).sample(stream, len(stream)), _vectors(stream, embedder))
        cut = int(0.4 * len(played.right))
        first = Examples(played.x[:cut], played.right[:cut], played.objected[:cut])
        rest = Examples(played.x[cut:], played.right[cut:], played.objected[cut:])
        plain = Examples(rest.x, rest.right, np.zeros_like(rest.objected))
        for wrong in (0.005, 0.01, 0.02):
            setting = f"{name} offline, at most {wrong:.1%} wrong"
            yield Row.of("hit_rate", "cosine alone", setting, "share", [hits_within(plain, rest.x[:, 0], wrong)])
            for system, verifier in (
                ("tierline, in domain", train([first])),
                ("tierline, other data", without(sets, name)),
            ):
                scores = np.array([verifier.logit(tuple(row)) for row in rest.x.tolist()])
                yield Row.of("hit_rate", system, setting, "share", [hits_within(rest, scores, wrong)])


def measure_bounds(deployments: int = 400, audits: int = 1500) -> Iterator[Row]:
    """Share of simulated deployments in which a bound was true at every look, after each of `audits` comparisons."""
    cases = {"steady 0.5 %": (0.005, 0.0), "steady 2 %": (0.02, 0.0), "drifting 0.5 to 3 %": (0.005, 0.025)}
    for name, (rate, rise) in cases.items():
        upper = lower = 0
        for seed in range(deployments):
            lot = random.Random(seed)
            errors, chances, fails_upper, fails_lower = 0, 0.0, False, False
            for n in range(1, audits + 1):
                # Where a bar moves, the chance of a wrong hit depends on what was found: after errors it is lower.
                chance = (rate + rise * n / audits) * (0.5 if errors > 0.02 * n else 1.0)
                chances += chance
                errors += lot.random() < chance
                if n < 20 or n % 25 == 0:
                    fails_upper |= upper_bound(errors, n, 0.95) < chances / n
                    fails_lower |= lower_bound(errors, n, 0.95) > chances / n
            upper += not fails_upper
            lower += not fails_lower
        yield Row.of("bound_true_at_every_look", "upper bound", name, "share", [upper / deployments])
        yield Row.of("bound_true_at_every_look", "lower bound", name, "share", [lower / deployments])


def published() -> Iterator[Row]:
    """What others have published about themselves, on their own data: no run of ours, and no like for like."""
    for threshold, hits, right in ((0.99, 0.235, 0.921), (0.95, 0.56, 0.926), (0.9, 0.745, 0.923), (0.8, 0.876, 0.918)):
        setting = f"63,796 LMArena questions, threshold={threshold:.2f}, published"
        yield Row.of("hit_rate", "AWS ElastiCache (Titan v2)", setting, "share", [hits])
        yield Row.of("false_hit_rate", "AWS ElastiCache (Titan v2)", setting, "share", [1 - right])
    for threshold, right, wrong in ((0.95, 425, 25), (0.9, 804, 77), (0.8, 904, 92)):
        setting = f"1,000 mock pairs, threshold={threshold:.2f}, published"
        yield Row.of("hit_rate", "GPTCache", setting, "share", [(right + wrong) / 1000])
        yield Row.of("false_hit_rate", "GPTCache", setting, "share", [wrong / (right + wrong)])


def _vectors(stream: list[Asked], embedder: TextEmbedder) -> dict[str, Vector]:
    texts = []
    for text in dict.fromkeys(asked.text for asked in stream):
        try:
            embedder.check(asked_form(text))
        except Refused:
            continue
        texts.append(text)
    return dict(zip(texts, embedder.embed([asked_form(text) for text in texts]), strict=True))
