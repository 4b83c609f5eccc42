"""`tierline tiers estimate` and `show`: what tiers cost a month, and what was learnt of how well they do."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.common import (
    Column,
    ConfigOption,
    Exit,
    JsonOption,
    fail,
    print_json,
    print_table,
    settings_or_exit,
    with_database,
)
from tiers import TIERS

if TYPE_CHECKING:
    from gateway.ledger.database import Database
    from gateway.ledger.tier_costs import TierCosts
    from gateway.outcomes.weighing import Counted
    from tiers.success import SuccessTable

PolicyOption = Annotated[str | None, typer.Option("--policy", metavar="NAME", help="Of one policy; default: of all.")]


def estimate(
    since: Annotated[str, typer.Option(metavar="WHEN", help="From: 2026-11-30, or ago: 7d, 24h.")] = "30d",
    until: Annotated[str | None, typer.Option(metavar="WHEN", help="Until, exclusive. Days are UTC.")] = None,
    policy: PolicyOption = None,
    machine_usd_per_hour: Annotated[
        str | None, typer.Option(metavar="USD", help="Cost of each replica that serves models without a price.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """What each tier costs a month by your traffic and prices, and what all of it would cost at each tier.

    Exit code 1: the database cannot be read, or holds no traffic of that time; 2: an option that cannot be used.
    """
    from gateway.ledger.money import InvalidAmount, parse_usd
    from gateway.ledger.prices import PriceBook
    from gateway.ledger.reports import InvalidReport, parse_span
    from gateway.ledger.tier_costs import tier_costs

    settings = settings_or_exit(config)
    rent: int | None = None
    if machine_usd_per_hour is not None:
        try:
            rent = parse_usd(machine_usd_per_hour)
        except InvalidAmount as error:
            fail(f"--machine-usd-per-hour: {error}", Exit.USAGE)
        if rent < 0:
            fail(f"--machine-usd-per-hour: '{machine_usd_per_hour}' is below 0", Exit.USAGE)

    async def run(database: Database) -> TierCosts:
        begins, ends = parse_span(since, until)
        assert begins is not None
        return await tier_costs(
            database, settings, PriceBook(settings), begins, ends or datetime.now(UTC),
            policy=policy, machine_nanousd_per_hour=rent,
        )  # fmt: skip

    found = with_database(settings, run, usage=(InvalidReport,))
    if not found.requests:
        of = "" if policy is None else f" of policy '{policy}'"
        fail(f"no request{of} reached a model since {found.since[:16]}: nothing to estimate from")
    if as_json:
        print_json(_costs_json(found))
    else:
        _print_costs(found)


def _costs_json(found: TierCosts) -> dict[str, Any]:
    import msgspec

    return dict(msgspec.to_builtins(found))


def _print_costs(found: TierCosts) -> None:
    from gateway.ledger.money import format_usd

    def usd(nanousd: int | None) -> str:
        """Cents are enough for an estimate."""
        return "-" if nanousd is None else format_usd(round(nanousd, -7)) if nanousd >= 10**9 else format_usd(nanousd)

    def claim(yuan: tuple[int, int | None]) -> str:
        low, high = yuan
        return f"from \u00a5{low:,}" if high is None else f"\u00a5{low:,}-{high:,}"

    titles = ("requests", "input", "output", "cost $", "month $", "all here, month $", "claimed, month")
    print_table(
        [Column("tier", "value"), Column("model"), *(Column(title, "number") for title in titles)],
        [
            [
                tier.tier,
                tier.model or "none",
                f"{tier.requests:,}",
                f"{tier.input_tokens:,}",
                f"{tier.output_tokens:,}",
                format_usd(tier.cost_nanousd),
                usd(tier.month_nanousd),
                usd(tier.all_month_nanousd),
                claim(tier.claimed_yuan),
            ]
            for tier in found.tiers
        ],
    )
    days = found.seconds / 86_400
    print(f"\nA month is 30 days at the rate of {found.requests:,} requests in {_span(found.seconds)}.", end="")
    print(" That is little to go by." if days < 1 else "")
    print(
        "claimed: what a published design for inference platforms, which reckons in yuan, says such a tier costs"
        " a month in a small deployment. To compare with; not measured here."
    )
    for tier in found.tiers:
        if tier.machines:
            print(f"{tier.tier}: {tier.machines} machine(s) by the hour; whether they carry all traffic is not known.")
        elif tier.price == "unpriced":
            print(f"{tier.tier}: '{tier.model}' has no price; give it one, or --machine-usd-per-hour.")


def _span(seconds: float) -> str:
    if seconds >= 2 * 86_400:
        return f"{seconds / 86_400:.1f} days"
    return f"{seconds / 3600:.1f} hours" if seconds >= 2 * 3600 else f"{seconds / 60:.1f} minutes"


def show(policy: PolicyOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """P(success) of each kind of request at each tier, as `tier: auto` goes by it, and the outcomes behind it.

    Exit code 1: the database cannot be read.
    """
    from gateway.ledger.rows import now_ms
    from gateway.outcomes import store
    from gateway.outcomes.service import learned

    async def run(database: Database) -> list[Counted]:
        return await store.read(database, now_ms() // store.DAY_MS)

    counted = with_database(settings_or_exit(config), run)
    known = sorted({item.policy for item in counted})
    if policy is not None and policy not in known:
        import sys

        print(f"tierline: nothing was learnt from policy '{policy}' itself", file=sys.stderr)
    # Without a name: as a policy without outcomes of its own sees it.
    table, version = learned(counted, policy or "")
    if as_json:
        print_json(_table_json(table, version, policy, counted))
    else:
        _print_learnt(table, version, policy, counted)


def _table_json(table: SuccessTable, version: str, policy: str | None, counted: list[Counted]) -> dict[str, Any]:
    cells = {
        kind: {
            tier: {
                "mean": table.kind(kind, tier).mean,
                "lower": table.kind(kind, tier).lower,
                "began": cell.source,
                "trials": cell.trials,
                "outcomes": cell.learned,
            }
            for tier, cell in row.items()
        }
        for kind, row in table.cells.items()
    }
    outcomes = [item._asdict() for item in counted]
    return {"policy": policy, "table": version, "kinds": cells, "outcomes": outcomes}


def _print_learnt(table: SuccessTable, version: str, policy: str | None, counted: list[Counted]) -> None:
    whose = "a policy without outcomes of its own" if policy is None else f"policy {policy}"
    print(f"P(success), mean and (at least), of {whose}; table {version}. + own outcomes, ? judgement\n")
    rows = []
    for kind, row in table.cells.items():
        cells = []
        for tier in TIERS:
            found, cell = table.kind(kind, tier), row[tier]
            mark = "+" if cell.learned else "?" if cell.source == "prior" else " "
            cells.append(f"{found.mean:.2f} ({found.lower:.2f}){mark}")
        rows.append([kind, *cells])
    print_table([Column("kind", "value"), *(Column(tier, "value") for tier in TIERS)], rows)
    shown = [item for item in counted if policy is None or item.policy == policy]
    if not shown:
        print("\nno outcomes yet")
        return
    print("\nOutcomes of the last 90 days, weighed by age")
    columns = [Column(name, "value") for name in ("policy", "team", "source", "kind", "tier")]
    print_table(
        [*columns, Column("good", "number"), Column("bad", "number")],
        [[i.policy, i.team or "-", i.source, i.kind, i.tier, f"{i.wins:.1f}", f"{i.losses:.1f}"] for i in shown],
    )
