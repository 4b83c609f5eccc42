"""Engines that share pages, each with a second pool, under random histories: answers right, books balanced."""

import contextlib
import select
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.limits import QueueFull
from engine.messages import NewRequest
from engine.transfer.host_store import HostStore
from engine.types import SamplingParams
from tests.engine.fakes import expected_tokens
from tests.engine.page_stores import DictStore, FakePages, TieredEngine, page_format

_FAULTS = [None, None, None, "fails", "damaged", "cut off", "other version", "exchanged", "bug"]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class SharedHistory(RuleBasedStateMachine):
    """Two engines with small pools and one store that fails, hangs, forgets and lies."""

    @initialize(slots=st.integers(1, 6), on_disk=st.booleans(), num_blocks=st.integers(8, 20))
    def start(self, slots, on_disk, num_blocks):
        self.clock = Clock()
        self.values: dict[bytes, bytes] = {}
        self.engines: list[TieredEngine] = []
        folder = Path(tempfile.gettempdir()) if on_disk else None
        for _ in range(2):
            plain = TieredEngine(num_blocks=num_blocks)
            size = page_format(plain.cache, FakePages(plain.runner)).value_bytes
            plain.tiers.close()
            self.engines.append(
                TieredEngine(
                    host=HostStore(slots * size, size, folder),
                    shared=DictStore(self.values),
                    clock=self.clock,
                    num_blocks=num_blocks,
                    max_num_seqs=3,
                    max_waiting=6,
                )
            )
        self.next_id = 1
        self.prompts: dict[int, list[int]] = {}
        self.gone: set[int] = set()

    @rule(
        which=st.integers(0, 1),
        # Few distinct tokens and prompts that begin alike, so that prefixes are shared often.
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=22),
        salt=st.sampled_from([None, "a"]),
        n=st.integers(1, 2),
    )
    def add(self, which, prompt, salt, n):
        ids = range(self.next_id, self.next_id + n)
        self.next_id += n
        params = SamplingParams(max_tokens=4)
        try:
            self.engines[which].add(*(NewRequest(i, prompt, params, salt, 1 if n > 1 else None) for i in ids))
        except QueueFull:
            return
        self.prompts.update(dict.fromkeys(ids, prompt))

    @rule(which=st.integers(0, 1), texts=st.lists(st.integers(1, 6), min_size=1, max_size=5))
    def texts_that_come_back(self, which, texts):
        """So often that their pages are worth keeping, and more of them than there is room for."""
        for text in texts:
            for _ in range(3):
                self.add(which, [text] * 17, None, 1)
                for _ in range(3):
                    self.something_arrives(which)
                    self.turn(which, None)

    @rule(which=st.integers(0, 1), fault=st.sampled_from([None] * 5 + ["step"]))
    def turn(self, which, fault):
        engine = self.engines[which]
        with contextlib.suppress(QueueFull):  # the core tells them; here it is enough that nothing of them stays
            engine.admit_loaded()
        if engine.scheduler.has_work:
            running = {row for row in self.prompts if row in engine.scheduler._requests}
            engine.step(fails=fault == "step")
            if fault == "step":
                self.gone |= running - set(engine.scheduler._requests)

    @rule(which=st.integers(0, 1), place=st.integers(0, 3))
    def preempt(self, which, place):
        """Its pages may come back from elsewhere, be late, or be here still."""
        scheduler = self.engines[which].scheduler
        for victim in scheduler._running[place : place + 1]:
            scheduler._preempt(victim)

    @rule(which=st.integers(0, 1), fault=st.sampled_from(_FAULTS), hangs=st.booleans())
    def trouble(self, which, fault, hangs):
        store = self.engines[which].shared.store
        store.fault = fault
        (store.gate.clear if hangs else store.gate.set)()

    @rule(seconds=st.sampled_from([0.1, 2.0, 30.0]))
    def time_passes(self, seconds):
        self.clock.now += seconds

    @rule(which=st.integers(0, 1))
    def something_arrives(self, which):
        select.select([self.engines[which].tiers.fileno()], [], [], 0.001)

    @rule(share=st.integers(2, 4))
    def the_store_forgets(self, share):
        for key in list(self.values)[::share]:
            self.values.pop(key, None)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data):
        number = data.draw(st.sampled_from(sorted(self.prompts)))
        self.gone.add(number)
        for engine in self.engines:
            engine.tiers.leave([number])
            engine.scheduler.abort([number])

    @invariant()
    def every_book_balances_and_every_token_is_right(self):
        if not hasattr(self, "engines"):
            return
        for engine in self.engines:
            engine.scheduler.check()
            engine.host.store.check()
            pool = engine.cache.pool
            assert pool.num_free + pool.num_cached + pool.num_used == pool.total
            for number, tokens in engine.tokens.items():
                assert tokens == expected_tokens(self.prompts[number], len(tokens))

    def teardown(self):
        if not hasattr(self, "engines"):
            return
        for engine in self.engines:
            engine.shared.store.gate.set()
            engine.shared.store.fault = None
            waiting = {request.request_id for request in engine.tiers.requests()}
            left = (set(engine.scheduler._requests) | waiting) - self.gone
            self.clock.now += 100.0
            for _ in range(400):
                try:
                    engine.admit_loaded()
                except QueueFull:
                    left -= waiting
                if not engine.scheduler.has_work:
                    break
                if not engine.step():  # all of it waits for pages
                    self.something_arrives(self.engines.index(engine))
                    self.clock.now += 1.0
            assert not engine.scheduler.has_work
            assert len(engine.tiers) == 0
            assert engine.cache.pool.num_used == 0
            for number in left:
                assert engine.tokens[number] == expected_tokens(self.prompts[number], 4)
            engine.tiers.close()


SharedHistory.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSharedHistory = SharedHistory.TestCase
