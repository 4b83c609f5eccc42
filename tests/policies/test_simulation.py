"""The arithmetic of a simulation: sums with replicates, thresholds, and what can be decided again from a record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from policies.evaluate import Decision
from policies.facts import Facts
from policies.load import Policy, load_file
from policies.simulation.costing import Costing
from policies.simulation.deciding import Decider, Undecided
from policies.simulation.recorded import Recorded, Served, Tokens
from policies.simulation.sums import Sums, Weights, of_the_next, of_the_sample, quantile, ratio, step
from policies.simulation.thresholds import InvalidThreshold, parse
from tests.policies.policy_files import policy
from tiers.success import SuccessTable, default_table


class World:
    """Output costs its tokens times the price of the model; input nothing."""

    def __init__(self, rules: Sequence[tuple[str, str | None]] | None = None) -> None:
        self.rules = rules
        self.prices = {"small": 1, "large": 10}

    def serve(self, decision: Decision, facts: Facts, known: str | None = None) -> Served | None:
        return Served(decision.tier, decision.tier) if decision.tier else None

    def cost(self, model: str, tokens: Tokens) -> tuple[int, int]:
        return 0, tokens.output * self.prices[model]

    def table(self, policy: Policy) -> SuccessTable:
        return default_table()

    def conditions(self, policy: str, version: str) -> Sequence[tuple[str, str | None]] | None:
        return self.rules


def request(rule: str = "default", output: int = 10, model: str = "small", **values: object) -> Recorded:
    return Recorded(
        request_id="r", ts_ms=1, facts=Facts(**values), policy="p", version="v", rule=rule, tier=model, wanted=model,
        fate="answered", served=Served(model, model), tokens=Tokens(output=output),
    )  # type: ignore[arg-type]  # fmt: skip


def test_the_mean_of_many_lies_in_its_interval_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    inside = {"sample": 0, "next": 0}
    for _ in range(100):
        weights, sums = Weights(), Sums[str]()
        values = rng.exponential(1.0, (2, 150))
        for value in values[0]:
            row = weights.next()
            sums.add("sum", row, float(value))
            sums.add("count", row)
        mean = ratio(sums.of("sum"), sums.of("count"))
        told = of_the_sample(mean)
        inside["sample"] += told.low <= 1.0 <= told.high
        inside["next"] += of_the_next(mean).low <= values[1].mean() <= of_the_next(mean).high
        weights._random = rng  # another draw for each, as each would be another recording
    assert 88 <= inside["sample"] <= 100
    assert 88 <= inside["next"] <= 100


def test_quantiles_are_within_a_step() -> None:
    rng = np.random.default_rng(2)
    times = rng.lognormal(5, 1, 3000)
    weights, steps = Weights(), Sums[int]()
    for ms in times:
        steps.add(step(float(ms)), weights.next())
    for share in (0.05, 0.5, 0.95):
        found = quantile({at: steps.of(at) for at in steps}, share)
        assert found[0] == pytest.approx(np.quantile(times, share), rel=0.02)
        told = of_the_sample(found)
        assert told.low < told.value < told.high


@pytest.mark.parametrize(
    ("text", "value", "exceeded"),
    [("cost>+10%", 0.11, True), ("cost > 10 %", 0.1, False), ("quality<-1%", -0.02, True), ("refused>0", 1, True),
     ("changed>20%", 0.2, False), ("latency>+5.5%", 0.06, True)],
)  # fmt: skip
def test_thresholds(text: str, value: float, exceeded: bool) -> None:
    assert parse(text).exceeded(value) is exceeded


@pytest.mark.parametrize("text", ["cost>10", "costs>1%", "cost=1%", "", "cost>+x%", "quality<1"])
def test_what_is_no_threshold(text: str) -> None:
    with pytest.raises(InvalidThreshold):
        parse(text)


RULES = """\
routes:
  - {name: refunds, when: 'user_text.contains("refund")', tier: large}
  - {name: long, when: prompt_tokens > 100, tier: large}
  - {name: sums, when: 'task == "math"', tier: xlarge}
  - {tier: small}
"""


def load(tmp_path: Path, body: str) -> Policy:
    path = tmp_path / "p.yaml"
    path.write_text(policy("p", body))
    return load_file(path)[0]


REFUNDS = ("refunds", "user_text.contains( 'refund' )".replace("( 'refund' )", '("refund")'))


@pytest.mark.parametrize(
    ("known", "recorded", "prompt_tokens", "rule"),
    [
        ([REFUNDS, ("rest", None)], "refunds", 5, "refunds"),  # it matched then
        ([REFUNDS, ("long", "prompt_tokens > 50")], "long", 500, "long"),  # it did not
        ([REFUNDS, ("rest", 'task == "math"')], "default", 500, "long"),
        ([("long", "prompt_tokens > 50"), REFUNDS], "long", 500, None),  # it was not looked at
        ([REFUNDS], "pinned", 500, None),
        (None, "refunds", 500, None),  # nobody knows what that version said
    ],
)
def test_texts_are_known_by_what_was_decided(
    tmp_path: Path, known: list[tuple[str, str | None]] | None, recorded: str, prompt_tokens: int, rule: str | None
) -> None:
    decider = Decider(World(known))
    asked = request(recorded, prompt_tokens=prompt_tokens)
    if rule is None:
        with pytest.raises(Undecided, match="refunds"):
            decider.decide(load(tmp_path, RULES), asked, asked.facts)
        return
    decision = decider.decide(load(tmp_path, RULES), asked, asked.facts)
    assert decision.rule == rule
    assert decision.tier == "large"


def test_what_the_classifier_was_not_asked_is_unknown(tmp_path: Path) -> None:
    decider = Decider(World([REFUNDS, ("rest", None)]))
    short, long = request("rest", prompt_tokens=5), request("rest", prompt_tokens=500)
    with pytest.raises(Undecided, match="sums"):
        decider.decide(load(tmp_path, RULES), short, short.facts)
    assert decider.decide(load(tmp_path, RULES), long, long.facts).rule == "long"  # it comes first
    auto = load(tmp_path, "routes: [{name: best, tier: auto}]\n")
    with pytest.raises(Undecided, match="best"):
        decider.decide(auto, short, short.facts)


def test_outputs_are_stretched_only_where_both_models_are_known() -> None:
    costing, weights = Costing(World()), Weights()
    for _ in range(40):
        costing.learn(request(output=10), weights.next())
        costing.learn(request(output=30, model="large"), weights.next())
    for _ in range(5):
        costing.elsewhere("new", request(output=10), "large", weights.next())
    total = of_the_sample(costing.total("new"))
    assert total.value == pytest.approx(5 * 30 * 10)
    assert costing.ratios("new") == {("small", "large"): (5, pytest.approx(3.0))}
    # Prompts of another length: both models are known on the shorter ones, and that is the best there is.
    for _ in range(5):
        costing.elsewhere("other", request(output=10, prompt_tokens=5000), "large", weights.next())
    other = of_the_sample(costing.total("other"))
    assert other.value == total.value
    lone = Costing(World())
    lone.elsewhere("new", request(output=10), "large", weights.next())
    alone = of_the_sample(lone.total("new"))
    assert alone.value == 100
    assert alone.high / alone.value > other.high / other.value
    assert lone.ratios("new") == {("small", "large"): (1, None)}
