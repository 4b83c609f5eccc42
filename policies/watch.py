"""Policies in force, kept up to date with their folder: a good edit counts within a second, a bad one changes nothing.

`PolicyStore` loads the folder once when it is made and then, from `start` on, whenever a file changes. A set that
does not load leaves the last good one in force and its faults in `problems`, until the next good edit; with a folder to
keep it in (`last_good.py`), also over a restart.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from policies import last_good as kept
from policies.examples import load_passing, problems, run
from policies.load import PolicySet, files_in, load, not_a_file
from policies.policyset import Standings
from policies.yamlfile import InvalidFile, Problem

logger = logging.getLogger("tierline.policies")

# How often the folder is looked at. Its content is read: a few small files cost less than the kernel's events, which
# network mounts do not send and which end when the folder is deleted and made again.
_LOOK_S = 0.25
_SETTLE_S = 0.04
_SETTLE_TRIES = 5


@dataclass(frozen=True, slots=True)
class Reload:
    """What a change of the folder led to: the set in force, and the faults if the change was refused."""

    policies: PolicySet
    problems: tuple[Problem, ...]

    @property
    def accepted(self) -> bool:
        return not self.problems


class PolicyStore:
    """The policies of a folder, reloaded while it runs. Readers take `current` once per request; it never changes.

    Args:
        directory: the policy folder.
        tiers_served: tiers that have a model, for fallbacks and warnings.
        models_served: names of the models, to check `model:`.
        on_reload: called after every change, accepted or not, in the watching thread; for log and metric. Where the
            folder is refused at the start already, also then, in the caller's thread.
        clock: the time, by which policies begin and end.
        uncalibrated: says at each load which models have no curve of confidence (`policies.confidence`).
        last_good: folder in which each set that comes into force is kept for the next start.

    Raises:
        InvalidFile: the folder does not load at the start, and there is no last good set that does.
    """

    def __init__(
        self,
        directory: Path,
        tiers_served: Collection[str] | None = None,
        models_served: Collection[str] | None = None,
        on_reload: Callable[[Reload], None] | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        uncalibrated: Callable[[], Mapping[str, str]] = dict,
        last_good: Path | None = None,
    ) -> None:
        self._directory = directory
        self._tiers_served = tiers_served
        self._models_served = models_served
        self._on_reload = on_reload
        self._clock = clock
        self._uncalibrated = uncalibrated
        self._last_good = last_good
        self._standings: Standings | None = None
        self._turning = threading.Lock()
        self._reloading = threading.Lock()
        self._signature = _signature(directory)
        self._problems: tuple[Problem, ...]
        found, self._problems = self._first()
        self._current = found.at(clock())
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if self._problems:
            self._tell()

    def _first(self) -> tuple[PolicySet, tuple[Problem, ...]]:
        """The set to start with, the folder's, or the last good one where an edit to the folder's would be refused: for
        which faults."""
        try:
            found = load(self._directory, self._tiers_served, self._models_served)
        except Exception as error:
            if (last := self._kept()) is None:
                raise
            return last, self._faults(error)
        unmet = problems(run(found), found.written)
        unmeasured = self._unmeasured()
        faults = [*(problem for problem in unmet if problem.severity == "error"), *unmeasured]
        if faults and (last := self._kept()) is not None and last.version != found.version:
            return last, tuple(faults)
        # Without another set to keep, or where only the program was upgraded and nobody has edited anything: it starts.
        for problem in (*unmet, *unmeasured):
            logger.warning("%s", problem)
        self._keep(found)
        return found, ()

    def _kept(self) -> PolicySet | None:
        """The last good set, if one was kept and still loads."""
        if self._last_good is None or not self._last_good.is_dir():
            return None
        try:
            with kept.locked(self._last_good):
                return load(kept.place(self._last_good), self._tiers_served, self._models_served)
        except Exception as error:
            logger.warning("the last good policies do not load either: %s", error)
            return None

    def _keep(self, policies: PolicySet) -> None:
        """Have a set that comes into force for the next start as well."""
        if self._last_good is not None:
            try:
                kept.keep(self._last_good, policies)
            except OSError as error:
                logger.warning("the last good policies could not be kept for the next start: %s", error)

    def _unmeasured(self) -> list[Problem]:
        """Where the policies ask for a confidence that nobody has measured here: answers are not checked by it."""
        try:
            load(self._directory, self._tiers_served, self._models_served, self._uncalibrated())
        except InvalidFile as error:
            return error.problems
        return []

    @property
    def current(self) -> PolicySet:
        """The set in force."""
        return self._current

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Why the folder's present content is not in force; empty while it is."""
        return self._problems

    @property
    def version(self) -> str:
        return self._current.version

    def start(self) -> None:
        """Watch the folder in a thread of its own until `close`. A second call does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="policy-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching; the set in force stays readable."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def reload(self) -> Reload | None:
        """Look at the folder now; None where its content is what was looked at last.

        A change counts once the folder has been still for a moment: a file that is being written is often empty or
        half there, and half a policy may well be a valid one. Whoever asks while another look goes on waits for it.
        """
        with self._reloading:
            return self._look()

    def _look(self) -> Reload | None:
        signature = _signature(self._directory)
        if signature == self._signature:
            return None
        for _ in range(_SETTLE_TRIES):
            self._stop.wait(_SETTLE_S)
            before, signature = signature, _signature(self._directory)
            if signature == before:
                break
        if signature == self._signature:
            return None
        self._signature = signature
        try:
            known = (self._tiers_served, self._models_served, self._uncalibrated())
            loaded = load_passing(self._directory, *known)
            self._take(loaded)
            self._problems = ()
        except Exception as error:
            self._problems = self._faults(error)
        else:
            self._keep(loaded)
        return self._tell()

    def _faults(self, error: Exception) -> tuple[Problem, ...]:
        """Why the folder's content does not count. A fault of the check itself is said like one of the files: the watch
        goes on, or no later edit would ever count."""
        if isinstance(error, InvalidFile):
            return tuple(error.problems)
        logger.error("policies could not be checked", exc_info=error)
        message = f"the policies could not be checked: {type(error).__name__}: {error}."
        return (Problem(str(self._directory), 1, 1, message),)

    def _tell(self) -> Reload:
        result = Reload(self._current, self._problems)
        if self._on_reload is not None:
            try:
                self._on_reload(result)
            except Exception:
                # The watch must outlive a listener that fails, or no later edit would ever count.
                logger.exception("a listener of policy reloads failed")
        return result

    def turn(self) -> None:
        """Have the policies of this moment in force: some may have begun or ended since the last look."""
        now, until = self._clock(), self._current.until
        if (until is not None and now >= until) or now < self._current.made:
            before = _in_force(self._current)
            after = _in_force(self._take())
            for name in sorted(after - before):
                logger.info("the time of a policy has come: %s", name)
            for name in sorted(before - after):
                logger.info("the time of a policy is over: %s", name)

    def stand(self, standings: Standings) -> None:
        """Have rollouts stand as they do now; until the first call they stand as the files say."""
        if standings != self._standings:
            self._standings = standings
            self._take()

    def _take(self, loaded: PolicySet | None = None) -> PolicySet:
        """Have what was loaded in force, or what is in force already, as of now."""
        with self._turning:  # the watch and whoever knows of rollouts come from different threads
            self._current = (loaded or self._current).at(self._clock(), self._standings)
            return self._current

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_S):
            self.reload()
            self.turn()


def _in_force(policies: PolicySet) -> set[str]:
    """Each policy with its version and what is raised in it, in words."""
    return {f"{p.name} {p.version}" + (f", raised: {p.raised}" if p.raised else "") for p in policies.policies}


def _signature(directory: Path) -> str:
    """A hash of names and contents of the policy files; editors that save twice or touch do not cause a reload."""
    digest = hashlib.sha256()
    try:
        for path in files_in(directory):
            try:
                other = not_a_file(path)
                content = path.read_bytes() if other is None else f"unreadable: {other}".encode()
            except OSError as error:
                content = f"unreadable: {error}".encode()
            digest.update(os.fsencode(path.name) + f"\0{len(content)}\0".encode())
            digest.update(content)
    except Exception as error:  # `load` meets it as well, and it is said there
        digest.update(repr(error).encode())
    return digest.hexdigest()
