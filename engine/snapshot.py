"""What the scheduler and its parts count, as one message for the HTTP process."""

from __future__ import annotations

from engine.messages import Stats
from engine.scheduling.scheduler import Scheduler
from engine.transfer.tiers import Tiers


def snapshot(scheduler: Scheduler, tiers: Tiers | None) -> Stats:
    """Pages, queue and counters of this moment; those that only the loop knows are 0."""
    cache, drafts = scheduler.cache, scheduler.speculator.stats
    return Stats(
        pages_total=cache.pool.total,
        pages_free=cache.pool.num_free,
        pages_cached=cache.pool.num_cached,
        pages_used=cache.pool.num_used,
        running=scheduler.num_running,
        waiting=scheduler.num_waiting + (0 if tiers is None else len(tiers)),
        prefill_tokens=scheduler.stats.prefill_tokens,
        generated_tokens=scheduler.stats.generated_tokens,
        preemptions=scheduler.stats.preemptions,
        recomputed_tokens=scheduler.stats.recomputed_tokens,
        prefix_queried_tokens=cache.stats.queried_tokens,
        prefix_hit_tokens=cache.stats.hit_tokens,
        prefix_evicted_pages=cache.stats.evicted_pages,
        aborts=scheduler.stats.aborts,
        draft_runs=drafts.runs,
        drafted_tokens=drafts.drafted_tokens,
        accepted_draft_tokens=drafts.accepted_tokens,
        prefix_missed_tokens=dict(cache.stats.missed_tokens),
        kv_loads={} if tiers is None else dict(tiers.loads),
        kv_tiers={} if tiers is None else tiers.counts(),
        step_token_budget=scheduler.step_budget.tokens,
    )
