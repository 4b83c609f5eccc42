"""Rank 0: the ranks as the core has them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from engine.config import EngineConfig
from engine.parallel.crew import Crew
from engine.parallel.errors import PeersLost
from engine.parallel.layout import Layout, Place
from engine.types import RowResult, Runner, StepPlan, nothing

if TYPE_CHECKING:
    from engine.parallel.peers import Peers

_NAME_SECONDS = 5.0  # within which a rank that has closed its connections is known by name


def lead(config: EngineConfig, threads: int, lost: Callable[[str], None]) -> Peers | None:
    """Start the other ranks and meet them; None where there are none. They end with this process.

    `threads`: of each rank. `lost`: called with the reason, from another thread, when a rank has ended.

    Raises LayoutError for too few GPUs, RuntimeError where a rank does not come.
    """
    layout = Layout(config.tensor_parallel, config.pipeline_parallel)
    if layout.num_ranks == 1:
        return None
    from engine.parallel.peers import Peers, choose_device

    place = Place(layout, 0)
    device = choose_device(config.device, place)
    crew = Crew(msgspec.structs.replace(config, threads=threads), layout, lost)
    return Peers.join(place, device, crew.meeting, crew.sockets)


class LeadingRunner:
    """`Runner` on rank 0. Whatever fails in a step leaves the other ranks in the middle of it, and ends the engine.

    It is no `AheadRunner`: the other ranks are told every token, and only rank 0 draws them.
    """

    def __init__(self, runner: Runner) -> None:
        self.geometry, self.max_model_len = runner.geometry, runner.max_model_len
        self._runner = runner

    def execute(self, plan: StepPlan, meanwhile: Callable[[], None] = nothing) -> list[RowResult]:
        """See `Runner`. Raises PeersLost for any fault."""
        try:
            return self._runner.execute(plan, meanwhile)
        except PeersLost:
            # Torch does not know who went away. If a rank has ended, `Crew` ends this process with the rank's name.
            time.sleep(_NAME_SECONDS)
            raise
        except Exception as error:
            raise PeersLost(f"a step failed on rank 0: {type(error).__name__}: {error}") from error
