"""The routes of a policy made ready: conditions compiled, their faults placed in the file, their cost bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.cost import MAX_POLICY_STEPS, in_words
from policies.expression import Condition, InvalidCondition, compile_condition
from policies.schema.escalation import Escalate, in_force
from policies.schema.routes import Route
from policies.yamlfile import Document, Problem
from policies.yamlread import Location


@dataclass(frozen=True, slots=True)
class Rule:
    """A route, ready to be evaluated. `index` counts from 0; `line` is where it starts in the file. `escalate` is what
    holds for its answers: its own, or the policy's."""

    index: int
    name: str
    route: Route
    condition: Condition | None
    line: int
    escalate: Escalate | None = None


def compile_rules(
    document: Document, routes: Sequence[Route], escalate: Escalate | None = None
) -> tuple[list[Rule], list[Problem]]:
    """The rules whose condition can be used, and the faults of the others."""
    rules: list[Rule] = []
    problems: list[Problem] = []
    steps = 0
    for index, route in enumerate(routes):
        try:
            condition = compile_condition(route.when) if route.when else None
        except InvalidCondition as error:
            problems += _problems(document, index, str(route.when), error)
            continue
        before, steps = steps, steps + (condition.steps if condition else 0)
        if steps > MAX_POLICY_STEPS >= before:
            message = f"the conditions up to here are too costly together: {in_words(steps)}; "
            message += f"at most {MAX_POLICY_STEPS:,} are allowed."
            problems.append(document.problem(("routes", index, "when"), message))
        line = document.position(("routes", index))[0]
        checked = in_force(route.escalate, escalate, route.cascade)
        rules.append(Rule(index, route.name or f"rule {index + 1}", route, condition, line, checked))
    return rules, problems


def _problems(document: Document, index: int, text: str, error: InvalidCondition) -> list[Problem]:
    path: Location = ("routes", index, "when")
    found = []
    for fault in error.faults:
        line, column = document.position_inside(path, text, fault.offset)
        found.append(Problem(document.file, line, column, fault.message, f"routes.{index}.when", fault.suggestion))
    return found
