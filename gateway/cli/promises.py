"""How a promise of the cache stands, in words for whoever wrote the policy."""

from __future__ import annotations

from datetime import UTC, datetime

from cache.promise.rule import Standing

_STATES = {
    "learning": "learning: too little has been compared to say which hits would be right; none is given",
    "shadow": "in the shadow: hits are found and compared, none is given",
    "serving": "serving by estimate: hits are given, their bound is not proved yet",
    "certified": "certified: hits are given, and audits prove that few enough are wrong",
}


def in_words(standing: Standing) -> list[str]:
    """Lines about one promise."""
    began = datetime.fromtimestamp(standing.since, UTC)
    most = _percent(standing.max_false_hit_rate)
    lines = [
        f"promise of policy {standing.policy}: at most {most} of the hits in other words are wrong",
        f"  {_STATES[standing.state]} (since {began:%Y-%m-%d %H:%M} UTC)",
    ]
    if standing.audits:
        assert standing.false_hit_rate is not None
        lines.append(
            f"  measured: {standing.errors:,} of {standing.audits:,} compared hits were wrong,"
            f" {_percent(standing.false_hit_rate)}; surely no more than {_percent(standing.upper)}"
            f" and no less than {_percent(standing.lower)}"
        )
    else:
        lines.append("  measured: no hit has been compared yet")
    if standing.certificate is not None:
        proof = standing.certificate
        on = datetime.fromtimestamp(proof.at, UTC)
        lines.append(
            f"  proved on {on:%Y-%m-%d %H:%M} UTC by {proof.audits:,} comparisons, {proof.errors:,} of them wrong:"
            f" at most {_percent(proof.upper)}"
        )
    if standing.bar is not None:
        lines.append(f"  bar: an answer must fit with a chance of {standing.bar:.4f}")
    lines.append(
        f"  given: {standing.served:,}; would-be hits: {standing.would_be_hits:,}, in the shadow"
        f" {standing.shadow_hits:,}; learned from {standing.labels:,} comparisons; broken {standing.breaches:,} times"
    )
    return lines


def _percent(rate: float) -> str:
    """Two decimals, more where they would say nothing."""
    return f"{rate * 100:.2f} %" if rate == 0 or rate >= 0.0001 else f"{rate * 100:.2g} %"
