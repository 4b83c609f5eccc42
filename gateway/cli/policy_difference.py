"""A simulation's report as text, in the order of the questions: how sure, how much, where to, who is stopped, which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from policies.simulation.report import Compared, Report, Side
from policies.simulation.sums import Estimate

_FIGURES = {
    "cost": "cost",
    "cost_per_request": "cost of a request",
    "latency_p50": "time to the end, median",
    "latency_p95": "time to the end, 95 %",
    "ttft_p50": "first token, median",
    "ttft_p95": "first token, 95 %",
    "quality": "good answers, predicted",
}


def as_text(found: Report, unusable: int) -> str:
    """The whole report."""
    return "\n".join(line.rstrip() for line in _lines(found, unusable))


def _lines(found: Report, unusable: int) -> Iterable[str]:
    span = f"{_moment(found.first_ms)} to {_moment(found.last_ms)} UTC"
    yield f"{found.requests:,} requests on record, {span}; they cost {_usd(found.recorded_cost_nanousd)}"
    yield f"{found.changed:,} of {found.compared:,} that could be compared would go another way"
    if found.reproduced is not None:
        yield f"replay names the rule of the record for {found.reproduced:.1%} of those whose policy is unchanged"
    yield from _left_out(found, unusable)
    if found.figures:
        yield ""
        rows = [
            [_FIGURES[name], *(_figure(figure, one) for one in (figure.old, figure.new)), _change(figure)]
            for name, figure in found.figures.items()
        ]
        yield from _table(["", "now", "new", "change"], rows)
        yield "in brackets: 95 % of spans like this one lie there; of the change, of the recorded requests"
    for title, mix in (("tier", found.tiers), ("model", found.models)):
        if mix:
            yield ""
            yield from _table([title, "now", "new"], [[one.name, _share(one.old), _share(one.new)] for one in mix])
    yield from _rules(found)
    yield from _limits(found)
    if found.hits:
        yield ""
        yield f"cache: {found.hits:,} hits, of which {found.hits_lost:,} would become requests"
    if found.most_changed:
        yield ""
        yield "requests that change most"
        for item in found.most_changed:
            yield f"  {item.request_id}  {_goes(item.old)} -> {_goes(item.new)}"
    told = [s for s in found.stretched if s.factor is not None]
    guessed = sum(s.requests for s in found.stretched if s.factor is None)
    notes = [
        f"'{s.instead}' answers {s.factor:.2f} times as long as '{s.answered}' ({s.requests:,} requests)" for s in told
    ]
    if guessed:
        notes.append(f"of {guessed:,} requests the answers are taken as long as they were: no model to compare with.")
    if notes or found.notes:
        yield ""
        yield "to know"
        yield from (f"  {note}" for note in (*notes, *found.notes))


def _left_out(found: Report, unusable: int) -> Iterable[str]:
    if unusable:
        yield f"left out: {unusable:,} records of an earlier version, which did not hold enough"
    if found.refused_otherwise:
        yield f"left out: {found.refused_otherwise:,} that no model was asked for, and no policy's limit stopped"
    if found.undecided_requests:
        yield f"left out: {found.undecided_requests:,} that cannot be decided again (texts are not on record)"
        for one in found.undecided:
            side = "now" if one.set == "old" else "new"
            yield f"  {one.requests:,} for rule '{one.rule}' of '{one.policy}' ({side})"


def _rules(found: Report) -> Iterable[str]:
    rows = [
        [rule.policy, rule.rule, _count(rule.old, rule.in_old), _count(rule.new, rule.in_new)]
        for rule in found.rules
        if rule.old or rule.new
    ]
    if rows:
        yield ""
        yield from _table(["policy", "rule", "now", "new"], rows)
    for rule in found.never_matched:
        yield f"never: no request matches '{rule.rule}' of '{rule.policy}'"


def _count(number: int, is_there: bool) -> str:
    return f"{number:,}" if number or is_there else "-"


def _limits(found: Report) -> Iterable[str]:
    if found.stopped or found.refused_old or found.refused_new:
        yield ""
        yield f"refused by limits of policies: {found.refused_old:,} now, {found.refused_new:,} new"
        for one in found.stopped:
            what = "wait" if one.limit in ("parallel", "queue") else "refused"
            yield (
                f"  {one.policy}, {one.limit}: {what} {one.old:,} now, {one.new:,} new"
                f" ({one.newly:,} newly, {one.no_more:,} no more)"
            )
    for spent in found.budgets:
        now, new = ("no budget" if used is None else f"{used:.1%} spent" for used in (spent.old, spent.new))
        yield f"budget of '{spent.policy}' at the end: {now} now, {new} new"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(len(row[i]) for row in (titles, *rows)) for i in range(len(titles))]
    for row in (titles, *rows):
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))


def _figure(figure: Compared, one: Estimate) -> str:
    if figure.unit == "share":
        return _share(one)
    if figure.unit == "ms":
        return f"{one.value:,.0f} ms ({one.low:,.0f} to {one.high:,.0f})"
    return f"{_usd(one.value)} ({_usd(one.low)} to {_usd(one.high)})"


def _change(figure: Compared) -> str:
    change = figure.change
    unit = " points" if figure.unit == "share" else " %"
    value, low, high = (f"{100 * number:+.1f}" for number in (change.value, change.low, change.high))
    return f"{value}{unit} ({low} to {high})"


def _share(one: Estimate) -> str:
    return f"{one.value:.1%} ({one.low:.1%} to {one.high:.1%})"


def _goes(side: Side) -> str:
    if side.stopped is not None:
        return f"refused ({side.stopped})"
    return f"{side.model or side.tier or 'nowhere'} by '{side.rule}', {_usd(side.cost_nanousd)}"


def _usd(nanousd: float) -> str:
    dollars = nanousd / 1e9
    return f"${dollars:,.2f}" if abs(dollars) >= 1 else f"${dollars:.6f}"


def _moment(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M}"
