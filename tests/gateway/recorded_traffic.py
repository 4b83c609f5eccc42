"""Requests on record without a gateway having served them: decided by real policies, answered by arithmetic."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import uuid_utils
from msgspec.structs import replace

from gateway.ledger.database import Database
from gateway.ledger.rows import Decision, LedgerRow
from policies.evaluate import decide
from policies.facts import Facts
from policies.load import PolicySet, Subject
from policies.recorded import recorded
from tiers.task import TaskProfile

PRICES = {"small": 100, "medium": 400, "large": 2000, "xlarge": 8000}  # nano-dollars per token of output
KINDS = {"label_text": "classification", "small_talk": "chat", "word_problem": "math", "write_function": "coding"}


def profile_of(kind: str, complexity: float) -> TaskProfile:
    return TaskProfile(KINDS[kind], 0.9, complexity, True, {"known_words": 0.9}, {}, {kind: 1.0})


def facts_at(rng: random.Random) -> Facts:
    """A request of a mixed office: labels, talk, sums and code, of two teams."""
    kind = rng.choice([*KINDS, "label_text"])
    tokens = int(rng.lognormvariate(5.5, 1.2)) + 5
    return Facts(
        prompt_tokens=tokens,
        stream=rng.random() < 0.5,
        organisation="acme",
        team=rng.choice(["support", "sales"]),
        key=f"key-{rng.randrange(5)}",
        profile=profile_of(kind, rng.random()),
        hour=rng.randrange(24),
    )


def answer(rng: random.Random, facts: Facts, model: str) -> tuple[int, float, float]:
    """Output tokens, time to the first token and to the end: larger models say more, and slower."""
    size = list(PRICES).index(model)
    brief = facts.profile is not None and facts.profile.task == "classification"
    output = 1 + int(rng.gammavariate(2, (20 if brief else 100) * (1 + size / 4)))
    first = rng.gammavariate(4, 10 * (1 + size))
    return output, first, first + output * (2 + size) * rng.uniform(0.9, 1.1)


def requests_of(
    policies: PolicySet,
    count: int,
    *,
    begins_ms: int,
    every_ms: int = 50,
    seed: int = 1,
    facts: Callable[[random.Random], Facts] = facts_at,
    text: Callable[[random.Random], str] = lambda rng: "",
) -> Iterator[tuple[Decision, LedgerRow]]:
    """Requests as a gateway with these policies would have put them on record."""
    rng = random.Random(seed)
    for number in range(count):
        ts_ms = begins_ms + number * every_ms
        said = text(rng)
        seen = replace(facts(rng), user_text=said) if said else facts(rng)
        subject = Subject(seen.organisation, seen.team, seen.project, seen.key, seen.model)
        policy = policies.resolve(subject)
        decision = decide(policy, seen)
        model = decision.model or decision.tier or "small"
        output, first, whole = answer(rng, seen, model)
        request_id = f"req-{uuid_utils.uuid7(ts_ms // 1000, ts_ms % 1000 * 1_000_000)}"
        features = recorded(seen)
        features["input_estimate"], features["output_estimate"] = seen.prompt_tokens, output
        yield (
            Decision(
                request_id=request_id,
                ts_ms=ts_ms,
                policy=policy.name,
                policy_version=policy.version,
                rule=decision.rule,
                tier=decision.requested_tier or "",
                model=model,
                features=features,
                candidates=[{"model": model, "tier": model, "backend": "b"}],
            ),
            LedgerRow(
                attempt_id=f"{request_id}-1",
                request_id=request_id,
                attempt=1,
                ts_ms=ts_ms,
                key_id=seen.key,
                policy=policy.name,
                policy_version=policy.version,
                tier=model,
                requested_tier=model,
                model=model,
                backend="b",
                outcome="success",
                status_code=200,
                input_tokens=seen.prompt_tokens,
                output_tokens=output,
                usage_source="reported",
                cost_nanousd=seen.prompt_tokens * PRICES[model] // 4 + output * PRICES[model],
                ttft_ms=first,
                duration_ms=whole,
                stream=seen.stream,
            ),
        )


async def put_on_record(database: Database, made: Sequence[tuple[Decision, LedgerRow]]) -> None:
    for start in range(0, len(made), 2000):
        page = made[start : start + 2000]
        await database.insert_rows([row for _, row in page], [decision for decision, _ in page])


TIERLINE_YAML = (
    """\
version: 1
policies_dir: policies
models:
"""
    + "".join(
        f"  {tier}: {{tier: {tier}, backend: b, capabilities: [tools], context_length: 100000, price: {{version: t,"
        f" input_usd_per_million: '{price / 4000:g}', output_usd_per_million: '{price / 1000:g}'}}}}\n"
        for tier, price in PRICES.items()
    )
    + 'backends: {b: {base_urls: ["http://127.0.0.1:1/v1"]}}\n'
)
