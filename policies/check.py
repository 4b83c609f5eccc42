"""`tierline policy check`: all problems of a folder or of one file, as a report for people, programs and CI."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from policies import examples
from policies.load import Policy, load, load_file
from policies.yamlfile import InvalidFile, Problem


@dataclass(frozen=True, slots=True)
class Report:
    """Errors block a policy, warnings do not. `policies` are the names that would be in force, `checked` theirs."""

    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    policies: tuple[str, ...]
    checked: tuple[Policy, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.errors

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "policies": list(self.policies),
            "errors": [asdict(problem) for problem in self.errors],
            "warnings": [asdict(problem) for problem in self.warnings],
        }

    def as_text(self) -> str:
        """`FILE:LINE:COLUMN: error: message`, one problem to the line, and a last line that sums up."""
        lines = [_line(problem) for problem in (*self.errors, *self.warnings)]
        if self.ok:
            names = ", ".join(self.policies)
            lines.append(f"{_count(len(self.policies), 'policy', 'policies')} checked, no error: {names}")
        else:
            lines.append(f"{_count(len(self.errors), 'error', 'errors')}: the last good version stays in force")
        return "\n".join(lines)


def check(
    path: Path,
    tiers_served: Collection[str] | None = None,
    models_served: Collection[str] | None = None,
    uncalibrated: Mapping[str, str] | None = None,
) -> Report:
    """Check a folder, or one file by itself (then conflicts with other policies are not looked for)."""
    try:
        if path.is_dir() or not path.exists():
            found = load(path, tiers_served, models_served, uncalibrated)
            return _report(examples.run(found), found.written, found.warnings)
        policy, _, warnings = load_file(path, tiers_served, models_served, uncalibrated)
        return _report(examples.run_policy(policy), [policy], warnings)
    except InvalidFile as error:
        return Report(tuple(error.problems), (), ())


def _report(results: list[examples.Result], policies: Sequence[Policy], warnings: Iterable[Problem]) -> Report:
    """With the examples that fail, which are errors where the policy says so."""
    failed = examples.problems(results, policies)
    errors = tuple(problem for problem in failed if problem.severity == "error")
    rest = tuple(problem for problem in failed if problem.severity != "error")
    names = tuple(dict.fromkeys(policy.name for policy in policies))
    return Report(errors, (*warnings, *rest), names, tuple(policies))


def _line(problem: Problem) -> str:
    head, _, rest = str(problem).partition(f":{problem.line}:{problem.column}: ")
    return f"{head}:{problem.line}:{problem.column}: {problem.severity}: {rest}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
