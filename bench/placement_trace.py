"""A trace of requests, replayed over replicas that are simulated: the real placement, the engine's real scheduler and
prefix cache, and in place of the model a clock.

    step = whichever is longer: its prompt tokens / PREFILL_PER_S, or its answers' tokens x (DECODE_S + rows x ROW_S)

The trace is Mooncake's: when a request came, how long prompt and answer were, and a number for each 512 tokens of the
prompt, equal where everything before is equal. To make a simulation of an hour a matter of seconds, a token of the
scheduler stands for `UNIT` tokens, so one of its steps is as long as that many of a real engine.
"""

from __future__ import annotations

import gzip
import hashlib
import heapq
import itertools
import json
import random
import statistics
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from backends.balance import choose as power_of_two
from backends.endpoint import Endpoint
from backends.placement.asked import Placement
from backends.placement.chain import Chain
from backends.placement.index import PrefixIndex
from backends.placement.placer import Placer
from backends.replica import Replica
from engine.kv.block_pool import BlockPool
from engine.kv.cached_pages import Told
from engine.kv.prefix_cache import PrefixCache
from engine.limits import SchedulerConfig
from engine.messages import NewRequest
from engine.scheduling.scheduler import Scheduler
from engine.types import RowResult, SamplingParams

BLOCK = 512  # tokens per number of the trace
UNIT = 16  # tokens per token of the simulated scheduler
PAGE = BLOCK // UNIT
STEP_TOKENS = 2048 // UNIT
PREFILL_PER_S = 10_000.0
DECODE_S, ROW_S = 0.010, 0.0001
MAX_NUM_SEQS = 64
CACHE_TOKENS = 2_000_000
_SEED = bytes(32)


@dataclass(frozen=True, slots=True)
class Asked:
    at: float  # seconds
    prompt: list[int]  # a token of the simulated scheduler each
    output: int
    blocks: list[int]
    prompt_tokens: int

    def chain(self) -> Chain:
        """As the gateway makes it of a text, with a digest per block."""
        tokens = range(BLOCK, self.prompt_tokens + 1, BLOCK)
        return tuple((block.to_bytes(8, "big"), end) for block, end in zip(self.blocks, tokens, strict=False))


def read(path: Path, most: int | None = None) -> list[Asked]:
    """The requests of a trace: a `.jsonl` or `.jsonl.gz` file, or a folder with one. Raises FileNotFoundError."""
    if path.is_dir():
        files = sorted(path.glob("*.jsonl*"))
        if not files:
            raise FileNotFoundError(f"{path} holds no .jsonl file")
        path = files[0]
    asked = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in itertools.islice(lines, most):
            entry = json.loads(line)
            blocks, length = entry["hash_ids"], entry["input_length"]
            units = max(1, length // UNIT)
            prompt = [block + 1 for block in blocks for _ in range(PAGE)][:units]
            output = max(1, entry["output_length"] // UNIT)
            asked.append(Asked(entry["timestamp"] / 1000, prompt, output, blocks, length))
    return asked


class Server:
    """A simulated replica. `busy`: a step is running."""

    def __init__(self, number: int) -> None:
        self.number = number
        pages = CACHE_TOKENS // BLOCK
        self.cache = PrefixCache(BlockPool(pages + 1), PAGE, model_digest=b"", kv_dtype="", seed=_SEED)
        bounds = SchedulerConfig(MAX_NUM_SEQS, STEP_TOKENS, 1 << 30, pages * PAGE)
        self.scheduler = Scheduler(bounds, self.cache, eos_token_ids=frozenset())
        self.busy = False

    def begin(self) -> float:
        """Begin a step; returns how long it takes."""
        plan = self.scheduler.schedule()
        rows = sum(1 for row in plan.rows if len(row.token_ids) == 1)
        self.plan, self.busy = plan, True
        prefill_s = (plan.num_tokens - rows) * UNIT / PREFILL_PER_S
        return max(prefill_s, UNIT * (DECODE_S + rows * ROW_S)) if rows else max(prefill_s, DECODE_S)

    def end(self) -> Iterator[tuple[int, bytes | None, bool]]:
        """End it: request, page of its prompt if this was its first token, and whether it has finished."""
        results = [RowResult(row.request_id, (0,) if row.sample else ()) for row in self.plan.rows]
        self.busy = False
        for output in self.scheduler.update(self.plan, results):
            first = output.cached_tokens is not None
            yield output.request_id, (output.prompt_page or b"") if first else None, output.finish_reason is not None


class Gateway(Protocol):
    """Chooses a replica, by its number, and hears what becomes of the request."""

    def choose(self, number: int, asked: Asked, now: float) -> int: ...
    def first(self, number: int, replica: int, page: bytes, seconds: float, now: float) -> None: ...
    def last(self, number: int, replica: int) -> None: ...
    def told(self, replica: int, news: Told) -> None: ...


def _replicas(number: int) -> list[Replica]:
    return [Replica(Endpoint(f"http://replica-{one}/v1")) for one in range(number)]


class Plain:
    """A rule that knows outstanding requests and latencies at most."""

    def __init__(self, kind: str, replicas: int) -> None:
        self._kind = kind
        self._replicas = _replicas(replicas)
        self._turns = itertools.cycle(range(replicas))
        self._ring = sorted((_point(f"{one}-{copy}"), one) for one in range(replicas) for copy in range(64))

    def choose(self, number: int, asked: Asked, now: float) -> int:
        match self._kind:
            case "random":
                chosen = random.randrange(len(self._replicas))
            case "round_robin":
                chosen = next(self._turns)
            case "consistent_hash":  # of the first two blocks: the first one is the same for all
                place = bisect(self._ring, (_point(str(asked.blocks[:2])), 0)) % len(self._ring)
                chosen = self._ring[place][1]
            case _:
                chosen = self._replicas.index(power_of_two(self._replicas, now))
        self._replicas[chosen].outstanding += 1
        return chosen

    def first(self, number: int, replica: int, page: bytes, seconds: float, now: float) -> None:
        self._replicas[replica].latency.observe(seconds, now)

    def last(self, number: int, replica: int) -> None:
        self._replicas[replica].outstanding -= 1

    def told(self, replica: int, news: Told) -> None:
        pass


class Placed:
    """The gateway's own. `events`: replicas tell their pages. `others`: gateways that tell each other what they do."""

    def __init__(self, replicas: int, *, events: bool, others: list[Placed] | None = None) -> None:
        self._events = events
        self._others = others
        self._index = PrefixIndex(remember_s=3600, remember_tokens=CACHE_TOKENS)
        self._replicas = _replicas(replicas)
        self._placer = Placer(self._replicas, MAX_NUM_SEQS, index=self._index)
        self._placements: dict[int, Placement] = {}
        if events:
            for replica in self._replicas:
                self._index.begin(replica, "space")
        if others is not None:
            others.append(self)
            self._index.tell = self._tell

    def _tell(self, replica: Replica, part: Chain, before: int) -> None:
        assert self._others is not None
        place = self._replicas.index(replica)
        for other in self._others:
            if other is not self:
                other._index.heard(other._replicas[place], part, before, self._now)

    def choose(self, number: int, asked: Asked, now: float) -> int:
        # The length of the answer is not known beforehand: the mean of the trace.
        placement = self._placements[number] = Placement(asked.prompt_tokens, 343, chain=asked.chain())
        replica = self._placer.choose(self._replicas, placement, now)
        assert replica is not None
        self._now = now
        self._placer.begin(replica, placement, now)
        replica.outstanding += 1
        return self._replicas.index(replica)

    def first(self, number: int, replica: int, page: bytes, seconds: float, now: float) -> None:
        placement, chosen = self._placements[number], self._replicas[replica]
        self._placer.answered(chosen, placement, page.hex())
        self._placer.began(chosen, placement, seconds, now)

    def last(self, number: int, replica: int) -> None:
        chosen = self._replicas[replica]
        chosen.outstanding -= 1
        self._placements.pop(number).end(chosen)

    def told(self, replica: int, news: Told) -> None:
        if self._events:
            self._index.change(self._replicas[replica], news.removed, news.stored)


def _gateways(kind: str, replicas: int, number: int) -> Sequence[Gateway]:
    if not kind.startswith("tierline"):
        return [Plain(kind, replicas) for _ in range(number)]
    together: list[Placed] | None = [] if kind == "tierline_shared" else None
    return [Placed(replicas, events=kind == "tierline_events", others=together) for _ in range(number)]


SYSTEMS = (
    "random", "round_robin", "power_of_two", "consistent_hash", "tierline_sent", "tierline_shared", "tierline_events",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """What a replay came to."""

    hit_share: float  # of all tokens of prompts
    ttft_p50_s: float
    ttft_p99_s: float
    imbalance: float  # the most prompt tokens that a replica computed, by the mean


def replay(
    trace: Sequence[Asked], kind: str, replicas: int, speed: float, *, gateways: int = 1, seed: int = 1
) -> Found:
    """Replay a trace, `speed` times as fast as it was recorded, through gateways that take turns and know each other
    not."""
    random.seed(seed)
    servers = [Server(number) for number in range(replicas)]
    doors = _gateways(kind, replicas, gateways)
    came: dict[int, tuple[float, int]] = {}
    ttft: list[float] = []
    steps: list[tuple[float, int]] = []  # when the step of a server ends
    following = iter(enumerate(trace))
    next_request = next(following, None)
    while next_request is not None or steps:
        if next_request is not None and (not steps or next_request[1].at / speed <= steps[0][0]):
            number, asked = next_request
            now = asked.at / speed
            replica = doors[number % gateways].choose(number, asked, now)
            came[number] = (now, replica)
            ready = servers[replica]
            params = SamplingParams(max_tokens=asked.output, ignore_eos=True)
            ready.scheduler.add([NewRequest(number, asked.prompt, params)])
            next_request = next(following, None)
        else:
            now, place = heapq.heappop(steps)
            ready = servers[place]
            ended = list(ready.end())
            if (news := ready.cache.news()) is not None:
                for door in doors:
                    door.told(place, news)
            for number, page, finished in ended:
                at, replica = came[number]
                if page is not None:
                    ttft.append(now - at)
                    doors[number % gateways].first(number, replica, page, now - at, now)
                if finished:
                    doors[number % gateways].last(number, replica)
                    del came[number]
        if not ready.busy and ready.scheduler.has_work:
            heapq.heappush(steps, (now + ready.begin(), ready.number))
    queried = sum(server.cache.stats.queried_tokens for server in servers)
    computed = [server.scheduler.stats.prefill_tokens for server in servers]
    ttft.sort()
    return Found(
        hit_share=sum(server.cache.stats.hit_tokens for server in servers) / queried,
        ttft_p50_s=statistics.median(ttft),
        ttft_p99_s=ttft[int(0.99 * len(ttft))],
        imbalance=max(computed) / statistics.mean(computed),
    )


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
