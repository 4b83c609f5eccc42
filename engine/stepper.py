"""Runs steps: one after the other, or each begun before the one before it is over.

    in turn   schedule k, run k, update k
    ahead     schedule k, begin its forward pass;  wait for the tokens of k - 1, update;  begin the draw of k

Ahead, a device has its next forward pass when it ends a draw, and the host schedules, prepares and tells meanwhile. A
row's last token is taken from where it was drawn, on the device. The draw begins when everything before its token is
known: stops, grammars and penalties need no guess, and a row of a request that has ended meanwhile yields nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.memory import EngineMemoryError
from engine.messages import Output
from engine.parallel.errors import PeersLost
from engine.scheduling.scheduler import Scheduler
from engine.trace import trace
from engine.transfer.tiers import Tiers
from engine.types import AheadRunner, Flight, RowResult, Runner, StepPlan

log = logging.getLogger("engine.core")

# Other processes are gone, and with them whatever this one is for.
_FATAL = (PeersLost, BrokenPipeError, ConnectionResetError)


@dataclass(frozen=True, slots=True)
class Done:
    """A step that is over."""

    plan: StepPlan
    outputs: list[Output]
    seconds: float
    has_failed: bool = False


@dataclass(slots=True)
class _Begun:
    plan: StepPlan
    start: float  # before it was scheduled
    planned: float
    flight: Flight | None = None
    fault: Exception | None = None


class Stepper:
    """The steps of one core."""

    def __init__(self, runner: Runner, scheduler: Scheduler, tiers: Tiers | None, *, ahead: bool) -> None:
        """`ahead`: begin each step before the one before it is over, wherever runner and scheduler can."""
        self._runner = runner
        self._ahead = runner if ahead and isinstance(runner, AheadRunner) else None
        self._scheduler = scheduler
        self._tiers = tiers
        self._begun: _Begun | None = None
        self._last_end = 0.0

    @property
    def is_ahead(self) -> bool:
        """Whether a step that is over was followed by the next one already."""
        return self._ahead is not None

    @property
    def is_flying(self) -> bool:
        """Whether a step has begun that is not over."""
        return self._begun is not None

    def step(self, meanwhile: Callable[[], None]) -> list[Done]:
        """Schedule and run; what is over by now, none if nothing could run. `meanwhile`: see `Runner.execute`.

        A fault of a step ends the requests of that step.

        Raises:
            PeersLost, BrokenPipeError, ConnectionResetError: another process is gone.
            PoolCorrupt, SchedulerStalled, ValueError: a bug.
        """
        done = self._turn(meanwhile) if self._ahead is None else self._turn_ahead(self._ahead)
        if done:
            trace.end(rows=len(done[-1].plan.rows), tokens=done[-1].plan.num_tokens)
        return done

    def _turn(self, meanwhile: Callable[[], None]) -> list[Done]:
        begun = self._schedule()
        return [self._finish(begun, lambda: self._runner.execute(begun.plan, meanwhile))] if begun else []

    def _turn_ahead(self, runner: AheadRunner) -> list[Done]:
        before, self._begun = self._begun, None
        begun = self._begin(runner) if before is None or self._scheduler.can_look_ahead else None
        done = [] if before is None else [self._finish(before, lambda: self._results(before))]
        if begun is None and before is not None and self._scheduler.has_work:
            begun = self._begin(runner)  # it was not to be had without results
        if begun is not None:
            self._draw(begun)
            if begun.fault is None:
                self._begun = begun
            else:
                done.append(self._finish(begun, lambda: self._results(begun)))
        return done

    def _schedule(self) -> _Begun | None:
        """The next step; None if there is none for now."""
        start = time.monotonic()
        trace.phase("queue")
        plan = self._scheduler.schedule()
        if not plan.rows:
            return None
        if self._tiers is not None:
            self._tiers.spill()
        return _Begun(plan, start, time.monotonic())

    def _begin(self, runner: AheadRunner) -> _Begun | None:
        """Schedule a step and begin its forward pass; None if there is none for now."""
        begun = self._schedule()
        if begun is None:
            return None
        try:
            begun.flight = runner.launch(begun.plan)
        except _FATAL:
            raise
        except Exception as error:
            begun.fault = error
        return begun

    def _draw(self, begun: _Begun) -> None:
        if begun.flight is None:
            return
        try:
            begun.flight.draw()
        except _FATAL:
            raise
        except Exception as error:
            begun.fault = error

    def _results(self, begun: _Begun) -> list[RowResult]:
        """What a step yielded. One that found too little memory is run again, alone and in pieces."""
        if isinstance(begun.fault, EngineMemoryError):
            return self._runner.execute(begun.plan)
        if begun.fault is not None or begun.flight is None:
            raise begun.fault or RuntimeError("the step did not begin")
        return begun.flight.results()

    def _finish(self, begun: _Begun, run: Callable[[], list[RowResult]]) -> Done:
        """Take over the results that `run` yields, and measure how long the step kept the next one waiting."""
        plan, scheduler = begun.plan, self._scheduler
        try:
            results = run()
        except _FATAL:
            raise
        except Exception as error:
            log.exception("a step of %d rows failed", len(plan.rows))
            outputs = scheduler.fail_step(f"The engine failed in a step: {type(error).__name__}: {error}")
            return Done(plan, outputs, self._seconds_since(begun.start), has_failed=True)
        trace.phase("post")
        computing = self._seconds_since(begun.planned)
        scheduler.speculator.timed(plan.num_tokens, computing)
        outputs = scheduler.update(plan, results)
        if self._tiers is not None:
            self._tiers.computed(plan.num_tokens, computing)
            self._tiers.share()
        seconds = self._seconds_since(begun.start)
        scheduler.step_budget.timed(plan, results, seconds)
        self._last_end = time.monotonic()
        return Done(plan, outputs, seconds)

    def _seconds_since(self, start: float) -> float:
        """Or since the step before it was over, if that was later."""
        return time.monotonic() - max(start, self._last_end)
