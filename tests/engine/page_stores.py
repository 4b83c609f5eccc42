"""For tests of pages that travel: pages of the runner without a model, as bytes, and a store that misbehaves."""

import select
import struct
import threading

from engine.kv.prefix_cache import PrefixCache
from engine.messages import NewRequest
from engine.transfer.courier import Tier
from engine.transfer.format import PageFormat
from engine.transfer.page_server import PageServer
from engine.transfer.peer_address import PeerAddress
from engine.transfer.peer_store import PeerStore
from engine.transfer.store import StoreFailed
from engine.transfer.tiers import Tiers
from engine.types import SamplingParams
from tests.engine.fakes import FakeRunner, check_plan, make_scheduler

_NOTHING = (1 << 64) - 1


class FakePages:
    """`PageMemory` of a `FakeRunner`."""

    layout = "fake"

    def __init__(self, runner: FakeRunner):
        self._runner = runner
        self._format = struct.Struct(f"<{runner.geometry.block_size}Q")
        self.page_bytes = self._format.size
        self.reads = 0

    def read(self, pages):
        self.reads += len(pages)
        return [
            self._format.pack(*(_NOTHING if kv is None else kv for kv in self._runner.pages[page])) for page in pages
        ]

    def write(self, pages, contents):
        for page, content in zip(pages, contents, strict=True):
            kept = self._format.unpack(content)
            self._runner.pages[page] = [None if kv == _NOTHING else kv for kv in kept]


class DictStore:
    """`PageStore` in a dictionary. `fault` says what goes wrong; while `gate` is clear, whoever asks waits."""

    name = "dict"
    batch = 2

    def __init__(self, values=None, *, knows=False):
        self.values = {} if values is None else values
        self.fault = None
        self.gate = threading.Event()
        self.gate.set()
        self.asked = 0
        self._knows = knows

    def load(self, keys):
        self.asked += 1
        self.gate.wait()
        if self.fault == "fails":
            raise StoreFailed("as told")
        if self.fault == "bug":
            raise RuntimeError("as told")
        return [self._spoilt(self.values.get(key)) for key in keys]

    def _spoilt(self, value):
        if value is None or self.fault is None:
            return value
        if self.fault == "damaged":
            return value[:-1] + bytes([value[-1] ^ 1])
        if self.fault == "cut off":
            return value[: len(value) // 2]
        if self.fault == "other version":
            return value[:4] + b"\xff\xff" + value[6:]
        assert self.fault == "exchanged", self.fault
        return next((other for other in self.values.values() if other != value), value[:10])

    def save(self, values):
        self.gate.wait()
        if self.fault == "fails":
            raise StoreFailed("as told")
        self.values.update(values)

    def discard(self, key):
        self.values.pop(key, None)

    def holds(self, key):
        return self._knows and key in self.values

    def close(self):
        pass


def page_format(cache: PrefixCache, memory: FakePages) -> PageFormat:
    return PageFormat(
        model_digest=b"fake model", layout=memory.layout, page_bytes=memory.page_bytes, secret=cache.secret(b"pages")
    )


def wait_saved(tier: Tier) -> None:
    """Until everything given to a tier is in its store, or dropped."""
    done = threading.Event()
    while tier.queued_bytes:
        done.wait(0.001)


class TieredEngine:
    """Scheduler, runner without a model, and tiers, turned as the core turns them."""

    def __init__(
        self,
        *,
        host=None,
        shared=None,
        peers=(),
        offers=None,
        offers_bytes=1 << 20,
        clock=None,
        seed=b"s" * 32,
        num_blocks=33,
        **bounds,
    ):
        """`host`, `shared`: stores. `peers`: addresses of other engines. `offers`: where others find its pages."""
        self.runner = FakeRunner(num_blocks)
        self.scheduler = make_scheduler(self.runner, **bounds)
        self.cache = self.scheduler.cache
        self.cache._seed = seed
        self.memory = FakePages(self.runner)
        self.format = page_format(self.cache, self.memory)
        extra = {} if clock is None else {"clock": clock}
        made = {
            name: Tier(store, self.format, **extra)
            for name, store in (("host", host), ("shared", shared))
            if store is not None
        }
        self.host, self.shared = made.get("host"), made.get("shared")
        secret = self.cache.secret(b"kv transfer")
        value_bytes = self.format.value_bytes
        self.peers = {
            address: Tier(
                PeerStore(PeerAddress.parse(address), space=self.format.space, secret=secret, value_bytes=value_bytes),
                self.format,
                **extra,
            )
            for address in peers
        }
        self.server = None
        if offers is not None:
            self.server = PageServer(PeerAddress.parse(offers), offers_bytes, self.format, secret)
        self.tiers = Tiers(self.cache, self.memory, **made, peers=self.peers, server=self.server, **extra)
        self._held_up = False
        self.tokens: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}

    def add(self, *requests: NewRequest) -> bool:
        """True: they wait for pages."""
        self.scheduler.check_fit(requests)
        if self.tiers.enter(requests, [self.scheduler.request_of(r) for r in requests], {}):
            return True
        self.scheduler.add(requests)
        return False

    def admit_loaded(self) -> None:
        for party in self.tiers.ready():
            self.scheduler.add(party.requests, party.grammars)
        self.tiers.look_again(self.scheduler.returning())

    def step(self, fails: bool = False) -> bool:
        """False: nothing could run, all there is waits for pages."""
        plan = self.scheduler.schedule()
        if not plan.rows:
            return False
        check_plan(self.scheduler, plan)
        self.tiers.spill()
        results = self.runner.execute(plan)
        outputs = self.scheduler.fail_step("as told") if fails else self.scheduler.update(plan, results)
        self.tiers.share()
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.cached_tokens is not None:
                self.cached[output.request_id] = output.cached_tokens
        self.scheduler.check()
        return True

    def turn(self) -> None:
        """Once round the loop."""
        waits = self._held_up or not self.scheduler.has_work
        select.select([self.tiers.fileno()], [], [], self.tiers.seconds_left() if waits else 0)
        self.admit_loaded()
        if self.scheduler.has_work:
            self._held_up = not self.step()

    def run(self) -> None:
        """Until nobody waits and nothing runs, and all is saved."""
        while self.scheduler.has_work or len(self.tiers):
            self.turn()
        for tier in self.tiers.tiers:
            wait_saved(tier)
        assert self.cache.pool.num_used == 0
        assert self.tiers.seconds_left() is None

    def ask(self, number: int, prompt, salt=None, max_tokens=6, pages_from=None):
        """The answer to one prompt, and how many of its tokens were cached."""
        params = SamplingParams(max_tokens=max_tokens)
        self.add(NewRequest(number, list(prompt), params, salt, pages_from=pages_from))
        self.run()
        return self.tokens[number], self.cached[number]


def tiered_engines():
    """Yields what makes a `TieredEngine`, and closes all that it has made."""
    made = []

    def make(**options):
        made.append(TieredEngine(**options))
        return made[-1]

    yield make
    for engine in made:
        for tier in engine.tiers.tiers:
            tier.store.gate.set()
        engine.tiers.close()
