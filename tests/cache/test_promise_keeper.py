"""The keeper: what it never does, what it learns, how a promise is proven, broken and kept over a restart."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache.promise.bounds import Alarm
from cache.promise.keeper import Keeper, Unusable
from cache.promise.rule import PromiseMode, Rule
from cache.verifier.features import FEATURES
from cache.verifier.model import Verifier
from cache.verifier.neighbours import Candidate

# A verifier that believes the first feature: log-odds.
SIMPLE = Verifier(
    "t", FEATURES, (0.0,) * len(FEATURES), (1.0,) * len(FEATURES), (1.0, *(0.0,) * (len(FEATURES) - 1)), 0.0
)
NOW = 1_700_000_000.0


def rule(mode: PromiseMode = "serve", **fields: float) -> Rule:
    values = {"max_false_hit_rate": 0.02, "audit_rate": 0.2, "min_audited": 100, **fields}
    return Rule(policy="support", mode=mode, **values)  # type: ignore[arg-type]


def near(chance: float, answer_id: int = 1, objection: str | None = None) -> Candidate:
    """A candidate that is right with `chance`, by the verifier above."""
    logit = math.log(chance / (1.0 - chance))
    return Candidate(answer_id, "q", 0.9, (logit, *(0.0,) * (len(FEATURES) - 1)), objection)


def keeper(seed: int = 0) -> Keeper:
    return Keeper(SIMPLE, clock=lambda: NOW, chance=random.Random(seed).random, first_ticket=1)


class Traffic:
    """Requests whose candidates are right as often as the verifier believes, or as `truth` makes of it."""

    def __init__(self, kept: Keeper, asked: Rule, seed: int = 0) -> None:
        self.kept, self.rule, self.lot = kept, asked, random.Random(seed)
        self.served = self.wrong = 0

    def run(self, requests: int, truth: Callable[[float], float] = lambda chance: chance) -> None:
        for _ in range(requests):
            chance = self.lot.choice((0.3, 0.8, 0.95, 0.99, 0.999, 0.9995))
            verdict = self.kept.decide(self.rule, near(chance, self.lot.randrange(50)))
            right = self.lot.random() < truth(chance)
            if verdict.action == "serve":
                self.served += 1
                self.wrong += not right
            else:
                assert verdict.ticket is not None
                self.kept.observe(verdict.ticket, right)
            for work in self.kept.due():
                self.kept.adopt(work.run())


STEPS = st.lists(
    st.tuples(
        st.floats(0.01, 0.9999), st.integers(0, 5), st.sampled_from([None, None, None, "negation"]), st.booleans()
    ),
    min_size=60,
    max_size=250,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS, st.sampled_from(["serve", "shadow", "certify"]), st.integers(0, 3))
def test_what_is_served_is_allowed(
    steps: list[tuple[float, int, str | None, bool]], mode: PromiseMode, seed: int
) -> None:
    kept, asked = keeper(seed), rule(mode, max_false_hit_rate=0.2, min_audited=10)
    for chance, answer, objection, right in steps:
        before = kept.standing("support")
        verdict = kept.decide(asked, near(chance, answer, objection))
        if verdict.action in ("serve", "audit"):
            assert objection is None
            assert mode != "shadow"
            assert before is not None
            assert before.state in ("serving", "certified")
            assert before.bar is not None
            assert verdict.p >= before.bar
        if objection is not None:
            assert (verdict.action, verdict.reason) == ("miss", objection)
        if mode == "certify" and verdict.action == "serve":
            assert before is not None
            assert before.certificate is not None
            assert before.certificate.upper <= asked.max_false_hit_rate
        if verdict.ticket is not None and verdict.action != "serve":
            kept.observe(verdict.ticket, right)
        for work in kept.due():
            kept.adopt(work.run())
    found = kept.standing("support")
    assert found is not None
    assert 0.0 <= found.lower <= found.upper <= 1.0
    assert found.errors <= found.audits
    # Kept over a restart: the same standing, and the same decisions from there on.
    other = Keeper(SIMPLE, clock=lambda: NOW, chance=random.Random(9).random, first_ticket=1)
    for dump in kept.dump().values():
        other.load(dump)
    assert other.standings() == kept.standings()
    kept._chance = random.Random(9).random
    for chance, answer, objection, _ in steps[:50]:
        one, two = (each.decide(asked, near(chance, answer, objection)) for each in (kept, other))
        assert (one.action, one.p, one.reason) == (two.action, two.p, two.reason)


def test_a_kept_promise_is_certified_then_served_and_audited_by_lot() -> None:
    kept = keeper()
    traffic = Traffic(kept, rule("certify"))
    traffic.run(150)
    assert traffic.served == 0
    traffic.run(4000)
    found = kept.standing("support")
    assert found is not None
    assert found.state == "certified"
    assert found.certificate is not None
    assert found.certificate.upper <= 0.02
    assert traffic.served > 500
    assert traffic.wrong / traffic.served <= 0.02
    assert found.audits / (found.audits + found.hits) == pytest.approx(0.2, abs=0.06)


def test_shadow_compares_and_never_serves() -> None:
    kept = keeper()
    traffic = Traffic(kept, rule("shadow"))
    traffic.run(2000)
    found = kept.standing("support")
    assert found is not None
    assert (traffic.served, found.state) == (0, "shadow")
    assert found.audits > 300
    assert found.upper < 0.05


def test_an_overconfident_verifier_is_found_out() -> None:
    kept = keeper()
    traffic = Traffic(kept, rule("serve"))
    traffic.run(6000, lambda chance: 1.0 - 5.0 * (1.0 - chance) if chance > 0.9 else chance / 2)
    assert traffic.served > 300
    assert traffic.wrong / traffic.served <= 0.02


@pytest.mark.parametrize("mode", ["serve", "certify"])
def test_a_burst_of_wrong_audits_ends_serving_within_the_stated_number(mode: PromiseMode) -> None:
    kept = keeper()
    asked = rule(mode)
    traffic = Traffic(kept, asked)
    traffic.run(5000)
    before = kept.standing("support")
    assert before is not None
    assert before.state in ("serving", "certified")
    audits = 0
    while audits < Alarm(asked.max_false_hit_rate).most_wrong_in_a_row:
        verdict = kept.decide(asked, near(0.9995))
        assert verdict.ticket is not None
        if verdict.action == "audit":
            audits += 1
            kept.observe(verdict.ticket, False)
        elif verdict.action != "serve":
            break
    after = kept.standing("support")
    assert after is not None
    assert after.breaches == before.breaches + 1
    assert after.state == "learning"
    assert after.certificate is None
    assert kept.decide(asked, near(0.9995)).action == "miss"


def test_after_a_breach_serving_comes_back_when_the_traffic_is_good_again() -> None:
    kept = keeper()
    traffic = Traffic(kept, rule("serve"))
    traffic.run(3000)
    traffic.run(1500, lambda chance: 0.5)
    found = kept.standing("support")
    assert found is not None
    assert found.breaches >= 1
    served, wrong = traffic.served, traffic.wrong
    traffic.run(6000)
    assert traffic.served - served > 300
    assert (traffic.wrong - wrong) / (traffic.served - served) <= 0.02


def test_an_answer_that_is_often_wrong_is_given_less() -> None:
    kept, asked = keeper(), rule("serve")
    lot = random.Random(1)
    for _ in range(600):
        answer = lot.randrange(20)
        verdict = kept.decide(asked, near(0.95, answer))
        if verdict.ticket is not None and verdict.action != "serve":
            kept.observe(verdict.ticket, answer != 7)
    for work in kept.due():
        kept.adopt(work.run())
    bad, good = kept.decide(asked, near(0.95, 7)).p, kept.decide(asked, near(0.95, 8)).p
    assert bad < 0.5 < good
    kept.forget(7)
    assert kept.decide(asked, near(0.95, 7)).p == pytest.approx(kept.decide(asked, near(0.95, 12345)).p)


def test_tickets_count_once_and_only_if_known() -> None:
    kept, asked = keeper(), rule("shadow")
    verdict = kept.decide(asked, near(0.9))
    assert verdict.ticket is not None
    for _ in range(3):
        kept.observe(verdict.ticket, True)
    kept.observe(999_999, False)
    found = kept.standing("support")
    assert found is not None
    assert found.labels == 1
    assert not kept.feedback(verdict.ticket, True)


def test_no_verdict_is_no_label() -> None:
    kept = keeper()
    traffic = Traffic(kept, rule("serve"))
    traffic.run(3000)
    before = kept.standing("support")
    verdict = kept.decide(traffic.rule, near(0.9995))
    while verdict.action != "audit":
        verdict = kept.decide(traffic.rule, near(0.9995))
    assert verdict.ticket is not None
    kept.observe(verdict.ticket, None)
    after = kept.standing("support")
    assert before is not None
    assert after is not None
    assert (after.labels, after.unjudged) == (before.labels, before.unjudged + 1)


def test_users_words_teach_but_count_for_no_bound() -> None:
    kept = keeper()
    traffic = Traffic(kept, rule("serve"))
    traffic.run(3000)
    before = kept.standing("support")
    assert before is not None
    tickets = []
    while len(tickets) < 150:
        verdict = kept.decide(traffic.rule, near(0.999, 77))
        if verdict.action == "serve":
            tickets.append(verdict.ticket)
    p = kept.decide(traffic.rule, near(0.999, 77)).p
    assert all(ticket is not None and kept.feedback(ticket, False) for ticket in tickets)
    assert tickets[0] is not None
    assert not kept.feedback(tickets[0], False)
    for work in kept.due():
        kept.adopt(work.run())
    after = kept.standing("support")
    assert after is not None
    assert after.audits == before.audits
    assert after.errors == before.errors
    assert kept.decide(traffic.rule, near(0.999, 77)).p < p


def test_an_edited_rule_begins_with_what_was_learned_and_proves_itself_anew() -> None:
    kept = keeper()
    traffic = Traffic(kept, rule("certify"))
    traffic.run(4000)
    stricter = rule("certify", max_false_hit_rate=0.01)
    assert kept.decide(stricter, near(0.9999)).action == "miss"
    for work in kept.due():
        kept.adopt(work.run())
    assert kept.decide(stricter, near(0.9999)).action == "shadow"
    found = kept.standing("support")
    assert found is not None
    assert (found.max_false_hit_rate, found.state, found.certificate) == (0.01, "shadow", None)
    assert kept.decide(traffic.rule, near(0.9999)).action in ("serve", "audit")


def test_damaged_or_foreign_dumps_are_refused() -> None:
    kept = keeper()
    Traffic(kept, rule("serve")).run(300)
    (dump,) = kept.dump().values()
    assert kept.dump() == {}
    for bad in (b"", b"\x00" * 40, dump[:-10]):
        with pytest.raises(Unusable):
            keeper().load(bad)
    with pytest.raises(Unusable, match="verifier"):
        Keeper(msgspec.structs.replace(SIMPLE, version="other")).load(dump)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_false_hit_rate": 0.0},
        {"max_false_hit_rate": 1.0},
        {"audit_rate": 0.0},
        {"audit_rate": 1.5},
        {"min_audited": 0},
        {"confidence": 1.0},
    ],
)
def test_rules_that_promise_nothing_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        rule("serve", **fields)


def test_deciding_takes_no_more_steps_after_much_was_learned() -> None:
    def steps(labels: int) -> int:
        """Function calls of a decision, at most."""
        kept = keeper()
        traffic = Traffic(kept, rule("serve"))
        traffic.run(labels)
        asked, found = near(0.99), []
        for _ in range(100):
            calls = 0

            def count(*_: object) -> None:
                nonlocal calls
                calls += 1

            sys.setprofile(count)
            kept.decide(traffic.rule, asked)
            sys.setprofile(None)
            found.append(calls)
        return max(found)

    few = steps(1000)
    assert steps(5000) <= few < 300


def test_the_bounds_of_a_standing_are_true_in_simulated_deployments() -> None:
    """With a bar that adapts, traffic that drifts and few errors: at every look, of all would-be hits of the regime."""
    failures, deployments = 0, 30
    for seed in range(deployments):
        kept, asked = keeper(seed), rule("serve", max_false_hit_rate=0.05)
        lot = random.Random(seed)
        regime, chances, failed = -1.0, [], False
        times = iter(range(10**6))
        kept._clock = lambda times=times: float(next(times))
        for n in range(900):
            worse = 1.0 + 3.0 * n / 900
            chance = lot.choice((0.6, 0.9, 0.98, 0.995, 0.999))
            wrong = min(1.0, worse * (1.0 - chance))
            verdict = kept.decide(asked, near(chance, lot.randrange(40)))
            right = lot.random() >= wrong
            standing = kept.standing("support")
            assert standing is not None
            if standing.since != regime:
                regime, chances = standing.since, []
            if verdict.action != "miss":
                chances.append(wrong)
            if verdict.ticket is not None and verdict.action != "serve":
                kept.observe(verdict.ticket, right)
                for work in kept.due():
                    kept.adopt(work.run())
            standing = kept.standing("support")
            assert standing is not None
            if standing.since == regime and len(chances) > 50:
                mean = sum(chances) / len(chances)
                failed |= not standing.lower <= mean <= standing.upper
        failures += failed
    assert failures <= 0.1 * deployments  # two bounds, of which each may fail in one of twenty
