"""`tierline explain ID`: the decision and the ledger rows of one request, named by its id or by its answer's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.common import ConfigOption, JsonOption, fail, print_json, settings_or_exit, with_database

if TYPE_CHECKING:
    from gateway.ledger.reports import Explanation

# Features that the table of tiers says.
_OF_TIERS = ("p_success", "p_success_lower", "bounds", "outcomes")


def explain(
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="From the header x-request-id or a log line; or the id of the answer.")
    ],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Why a request went where it went, every attempt it made, and what each cost.

    Exit code 1: no such request is on record. Prompts and answers are never on record.
    """
    from gateway.ledger import reports

    found = with_database(settings_or_exit(config), lambda database: reports.explain(database, request_id))
    if found is None:
        fail(f"nothing is on record about request {request_id}")
    if as_json:
        print_json(
            {
                "request_id": found.request_id,
                "decision": found.decision,
                "tiers": found.tiers,
                "attempts": found.rows,
                "notes": found.notes,
            }
        )
    else:
        _print(found)


def _print(found: Explanation) -> None:
    from gateway.ledger.money import format_usd

    print(f"request {found.request_id}")
    if found.decision is None:
        print("  no routing decision: it was refused, or answered before one was needed")
    else:
        _print_decision(found.decision)
        _print_tiers(found.tiers, found.decision.get("features", {}).get("quality_target"))
    for row in found.rows:
        moment = datetime.fromtimestamp(row["ts_ms"] / 1000, UTC).isoformat(timespec="milliseconds")
        where = " on ".join(part for part in (row["model"], row["backend"]) if part) or "nowhere"
        status = f" ({row['status_code']})" if row["status_code"] else ""
        ttft = "" if row["ttft_ms"] is None else f", first token after {row['ttft_ms']:.0f} ms"
        print(f"\nattempt {row['attempt']}  {moment}  {where}: {row['outcome']}{status}")
        _line("tier", _was(row["tier"], row["requested_tier"]))
        _line("cache", row["cache"])
        _line("replica", row["replica"])
        _line("placed", row["placed"])
        _line("time", "unknown" if row["outcome"] == "interrupted" else f"{row['duration_ms']:.0f} ms{ttft}")
        cached = f" ({row['cached_input_tokens']} cached)" if row["cached_input_tokens"] else ""
        tokens = f"{row['input_tokens']} in{cached}, {row['output_tokens']} out, {row['usage_source']}"
        _line("tokens", tokens)
        _line("cost", f"${format_usd(row['cost_nanousd'])} at {row['price_version'] or 'no price'}")
        _line("saved", f"${format_usd(row['saved_nanousd'])}" if row["saved_nanousd"] else "")
        _line("tags", ", ".join(f"{name}={value}" for name, value in row["tags"].items()))
        _line("finished", row["finish_reason"])
        _line("error", row["error"])
    for note in found.notes:
        moment = datetime.fromtimestamp(note["ts_ms"] / 1000, UTC).isoformat(timespec="milliseconds")
        print(f"\n{note['kind']}  {moment}")
        for name, value in note.items():
            if name not in ("ts_ms", "kind"):
                _line(name, _shown(value))


def _print_decision(decision: dict[str, Any]) -> None:
    version = decision.get("policy_version", "")
    policy = decision.get("policy", "")
    _line("policy", f"{policy}@{version}" if version else policy)
    _line("rule", decision.get("rule", ""))
    _line("why", decision.get("why", ""))
    _line("reason", decision.get("reason", ""))
    _line("tier", decision.get("tier", ""))
    _line("model", decision.get("model", ""))
    features = decision.get("features", {})
    _block("features", {name: value for name, value in features.items() if name not in _OF_TIERS})
    for number, candidate in enumerate(decision.get("candidates", []), 1):
        _block(f"candidate {number}", {name: value for name, value in candidate.items() if name != "rates"})


def _print_tiers(tiers: list[dict[str, Any]], target: float | None) -> None:
    """A line per tier: how likely it was to do well, what it costs for these tokens, why it was chosen or not."""
    from gateway.ledger.money import format_usd
    from tiers.choose import bound_text

    if not tiers:
        return
    lines = [("tier", "model", "P", "at least", "outcomes", "cost $", "")]
    for tier in tiers:
        exact = tier["cost_nanousd"] is not None
        amount = tier["cost_nanousd"] if exact else tier["estimated_nanousd"]
        cost = "-" if amount is None else f"{'' if exact else '~'}{format_usd(amount)}"
        numbers = ["-" if tier["p"] is None else f"{tier['p']:.2f}"]
        numbers.append("-" if tier["lower"] is None else bound_text(tier["lower"], target))
        outcomes = "-" if tier["outcomes"] is None else f"{tier['outcomes']:g}"
        mark = "" if tier["role"] is None else f"{tier['role']}: " if tier["role"] != "chosen" else ""
        lines.append((tier["tier"], tier["model"] or "-", *numbers, outcomes, cost, f"{mark}{tier['why']}"))
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    print("  tiers")
    for name, model, *values, why in lines:
        cells = [f"{value:>{width}}" for value, width in zip(values, widths[2:], strict=True)]
        print(f"    {name:<{widths[0]}}  {model:<{widths[1]}}  {'  '.join(cells)}  {why}".rstrip())


def _was(tier: str, requested: str) -> str:
    return f"{tier} (asked for {requested})" if requested and requested != tier else tier


def _line(name: str, value: str) -> None:
    if value:
        print(f"  {name:<10} {value}")


def _block(title: str, values: dict[str, Any]) -> None:
    """One value to the line, below their title."""
    if not values:
        return
    print(f"  {title}")
    width = max(len(name) for name in values)
    for name, value in values.items():
        print(f"    {name:<{width}}  {_shown(value)}")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (f"{round(value, 3):g}" if isinstance(value, float) else str(value)) or "-"
