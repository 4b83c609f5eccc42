"""One promise: its bar, its regime, and when serving begins and ends.

    learning ──a bar keeps the estimate under the promise──► shadow ──bound under the promise──► certified
        ▲                                                       │ (mode `serve`: at once)            │
        └──────────────── the alarm, or a bound above the promise: a breach ◄────────────────────────┘

A regime is a time in which the audits are alike: they count together, and with each regime they begin anew. The bar
may rise at any time: fewer answers are given, and the bounds hold for a bar that moves by what is known already. It
falls in mode `certify` only into a new regime: before a certificate when the labels have doubled, after one when the
audits of the present regime have kept the promise by themselves.
"""

from __future__ import annotations

import msgspec

from cache.promise.bounds import Alarm, lower_bound, upper_bound
from cache.promise.fit import Array, Fit
from cache.promise.memory import Memory
from cache.promise.rule import Action, Certificate, Kind, Rule, Standing, State
from cache.verifier.model import probability

MOST_LABELS = 4000
# Labels above a bar that it needs, and new labels that make a new fit worth while: these, or this share of all.
FEWEST_FOR_BAR = 30
_FEWEST_NEW, _SHARE_NEW = 25, 0.04


class Regime(msgspec.Struct):
    """What was counted since `since`. `serving`: audits are drawn by lot; else every would-be hit is compared."""

    number: int
    since: float
    serving: bool
    labels_before: int
    audits: int = 0
    errors: int = 0
    hits: int = 0
    level: float = 0.0  # of the alarm
    quiet_at: int = 0  # labels when that level was last 0: where a change, if there is one, began


class Totals(msgspec.Struct):
    """Counts since the beginning."""

    would_be_hits: int = 0
    shadow_hits: int = 0
    served: int = 0
    labels: int = 0
    unjudged: int = 0
    breaches: int = 0


class Promise:
    """Decides on standardised features, and learns from what was right. One thread."""

    def __init__(self, rule: Rule, prior: Array, now: float) -> None:
        self.rule = rule
        self.prior = prior
        self.memory = Memory(len(prior) - 1, MOST_LABELS)
        self.totals = Totals()
        self.certificate: Certificate | None = None
        self.bar: float | None = None
        self.trusted_from = 0  # labels before this one say nothing of today's rates
        self.fitted_at = 0
        self.regime = Regime(0, now, False, 0)
        self.take(Fit(prior))

    @property
    def state(self) -> State:
        if self.bar is None:
            return "learning"
        if not self.serving:
            return "shadow"
        return "certified" if self.certificate else "serving"

    @property
    def serving(self) -> bool:
        """Whether would-be hits are served at all."""
        if self.bar is None or self.rule.mode == "shadow":
            return False
        return self.rule.mode == "serve" or self.certificate is not None

    def chance(self, features: list[float], answer_id: int) -> float:
        """The chance that the answer is right."""
        logit = self._intercept + self.fitted.shifts.get(answer_id, 0.0)
        logit += sum(map(float.__mul__, features, self._coefficients))
        return probability(logit)

    def decide(self, chance: float, coin: float) -> tuple[Action, str | None]:
        """What to do with a candidate of this chance. `coin` is drawn evenly from [0, 1), independently of all else."""
        if self.bar is None:
            return "miss", "learning"
        if chance < self.bar:
            return "miss", "below_bar"
        self.totals.would_be_hits += 1
        if not self.serving:
            self.totals.shadow_hits += 1
            return "shadow", None
        if coin < self.rule.audit_rate:
            return "audit", None
        self.regime.hits += 1
        self.totals.served += 1
        return "serve", None

    def learn(
        self, kind: Kind, regime: int, features: tuple[float, ...], answer_id: int, right: bool, now: float
    ) -> None:
        """Remember a judged candidate, and count it where it is an audit of this regime."""
        if kind != "guarded":
            weight = 1.0 / self.rule.audit_rate if kind == "audit" else 1.0
            self.memory.add(features, answer_id, right, weight, kind != "serve")
        self.totals.labels += 1
        if kind in ("audit", "shadow") and regime == self.regime.number:
            self._count(right, now)

    def _count(self, right: bool, now: float) -> None:
        regime, rule = self.regime, self.rule
        regime.audits += 1
        regime.errors += not right
        if regime.serving:
            alarm = Alarm(rule.max_false_hit_rate, regime.level)
            set_off = alarm.add(not right)
            regime.level = alarm.level
            if regime.level == 0.0:
                regime.quiet_at = self.memory.seen
            if set_off or self._lower() > rule.max_false_hit_rate:
                self._breach(now, regime.quiet_at if set_off else regime.labels_before)
                return
        if self.certificate is None and rule.mode != "shadow" and self._proven():
            self.certificate = Certificate(now, regime.audits, regime.errors, self._upper())
            if not regime.serving:
                self._begin(now)

    def _proven(self) -> bool:
        return self.regime.audits >= self.rule.min_audited and self._upper() <= self.rule.max_false_hit_rate

    def _breach(self, now: float, changed_at: int) -> None:
        self.totals.breaches += 1
        self.certificate = None
        self.bar = None
        self.trusted_from = changed_at
        self.fitted_at = -self.memory.most
        self._begin(now)

    def _begin(self, now: float) -> None:
        number = self.regime.number + 1
        self.regime = Regime(number, now, self.serving, self.memory.seen, quiet_at=self.memory.seen)

    @property
    def due(self) -> bool:
        """Whether enough was learned since the last fit for a new one."""
        fresh = self.memory.seen - self.fitted_at
        return fresh >= max(_FEWEST_NEW, _SHARE_NEW * len(self.memory))

    def adopt(self, fitted: Fit, seen: int, now: float) -> None:
        """Take over a fit made when `seen` labels were known; see above for when its bar counts."""
        self.fitted_at = seen
        self.take(fitted)
        bar, before = fitted.bar, self.serving
        if bar is None or self.bar is None or bar >= self.bar or self.rule.mode != "certify":
            had_none = self.bar is None
            self.bar = bar
            if bar is None:
                self.certificate = None
            if self.serving != before or (bar is None) != had_none:
                self._begin(now)
        elif self._may_fall():
            self.bar = bar
            if self.certificate is not None:
                self.certificate = Certificate(now, self.regime.audits, self.regime.errors, self._upper())
            self._begin(now)

    def _may_fall(self) -> bool:
        if self.certificate is not None:
            return self._proven()
        return self.memory.seen >= 2 * self.regime.labels_before

    def take(self, fitted: Fit) -> None:
        """Decide by these coefficients and shifts from now on."""
        self.fitted = fitted
        self._intercept = float(fitted.coefficients[0])
        self._coefficients: list[float] = fitted.coefficients[1:].tolist()

    def forget(self, answer_id: int) -> bool:
        """An answer is gone: the shift that it earned goes with it. False when it had none."""
        return self.fitted.shifts.pop(answer_id, None) is not None

    def keep_counts(self, own: Promise) -> None:
        """Take over what another process knows, and go on counting what is given here."""
        theirs, ours = self.totals, own.totals
        for name in ("would_be_hits", "shadow_hits", "served", "unjudged"):
            setattr(theirs, name, getattr(ours, name))
        self.regime.hits = own.regime.hits if own.regime.number == self.regime.number else 0

    def inherit(self, other: Promise) -> None:
        """Start with the labels and the fit of another rule of the same policy; its bar and its counts are its own."""
        x, rows = other.memory.arrays()
        self.memory.restore(other.memory.seen, x, rows)
        self.trusted_from = other.trusted_from
        self.take(other.fitted)
        self.fitted_at = -self.memory.most
        self.regime.labels_before = self.regime.quiet_at = self.memory.seen

    def standing(self) -> Standing:
        regime, totals = self.regime, self.totals
        return Standing(
            policy=self.rule.policy,
            state=self.state,
            max_false_hit_rate=self.rule.max_false_hit_rate,
            bar=self.bar,
            since=regime.since,
            audits=regime.audits,
            errors=regime.errors,
            false_hit_rate=regime.errors / regime.audits if regime.audits else None,
            upper=self._upper(),
            lower=self._lower(),
            hits=regime.hits,
            certificate=self.certificate,
            breaches=totals.breaches,
            would_be_hits=totals.would_be_hits,
            shadow_hits=totals.shadow_hits,
            served=totals.served,
            labels=totals.labels,
            unjudged=totals.unjudged,
        )

    def _upper(self) -> float:
        return upper_bound(self.regime.errors, self.regime.audits, self.rule.confidence)

    def _lower(self) -> float:
        return lower_bound(self.regime.errors, self.regime.audits, self.rule.confidence)
