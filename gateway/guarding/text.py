"""One text on its way to a client: what is held back of it, and what can be given."""

from __future__ import annotations

from typing import Final

from gateway.guarding.findings import Findings
from policies.guards import Finding, Guard

_CONTEXT: Final = 64  # characters before what is held back that patterns may look at
_GROWING: Final = 8  # windows that a match which is still growing may take before it is replaced as it is


class Denied(Exception):
    """A rule that denies has found something."""

    def __init__(self, guard: Guard) -> None:
        super().__init__(guard.rule.name)
        self.guard = guard


class Text:
    """`held` is what is held back, `before` a little of what was given before."""

    __slots__ = ("before", "held")

    def __init__(self) -> None:
        self.held = ""
        self.before = ""

    def take(self, guards: tuple[Guard, ...], window: int | None, findings: Findings) -> str:
        """What can be given now, with its findings replaced; `window` None: nothing is held back any more.

        Raises:
            Denied: by the first rule that finds what it denies, in all that is held.
        """
        base = len(self.before)
        found = [
            (Finding(finding.start - base, finding.end - base, finding.kind), guard)
            for guard in guards
            for finding in guard.find(self.before + self.held)
            if finding.start >= base
        ]
        for finding, guard in found:
            if guard.rule.action == "deny":
                findings.add(guard, [finding.kind])
                raise Denied(guard)
        cut = len(self.held) - (window or 0)
        if cut <= 0:
            return ""
        found.sort(key=lambda pair: pair[0])
        if window is not None:
            cut = self._before_findings(cut, [finding for finding, _ in found], window)
        given = self._replaced(cut, found, findings)
        self.before = (self.before + self.held[:cut])[-_CONTEXT:]
        self.held = self.held[cut:]
        return given

    def _before_findings(self, cut: int, found: list[Finding], window: int) -> int:
        """Where to cut so that no finding is torn, nor one given that may still grow."""
        end = len(self.held)
        for finding in reversed(found):
            torn = finding.start < cut and (finding.end > cut or finding.end == end)
            if torn and end - finding.start < _GROWING * window:
                cut = finding.start
        return cut

    def _replaced(self, cut: int, found: list[tuple[Finding, Guard]], findings: Findings) -> str:
        pieces: list[str] = []
        at = 0
        for finding, guard in found:
            if finding.start >= cut:
                break
            if finding.start < at:  # within another one
                continue
            findings.add(guard, [finding.kind])
            if guard.rule.action == "redact":
                pieces += self.held[at : finding.start], guard.rule.replacement.replace("{kind}", finding.kind)
                at = min(finding.end, cut)
        return "".join((*pieces, self.held[at:cut]))
