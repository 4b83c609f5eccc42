"""Which policy folder a command is about, which tiers and models are served there, and what the ledger says of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gateway.cli.common import config_path, settings_or_exit, short, with_database

if TYPE_CHECKING:
    from gateway.settings import Settings
    from policies.check import Report
    from policies.evaluate import Chooser
    from policies.policy import Policy


def environment(path: Path | None, config: Path | None) -> tuple[Path, list[str] | None, list[str] | None]:
    """The policy folder, and the tiers and models that are served; None where there is no configuration to ask."""
    if path is not None and config is None and not config_path(None).exists():
        return path, None, None
    settings = settings_or_exit(config)
    return path or Path(short(settings.policies_dir)), settings.tiers_served(), list(settings.models)


def advised(report: Report, settings: Settings, *, with_traffic: bool | None) -> Report:
    """The report with warnings that need the platform file, and the ledger.

    The ledger is asked where that is wanted, and unless it is not wanted also where it is a file of this machine and a
    policy has a budget; then a ledger that cannot be read is no reason to stop.
    """
    from gateway.policy_advice import read_traffic, settings_advice, traffic_advice

    found = settings_advice(report.checked, settings)
    if with_traffic:
        found += traffic_advice(report.checked, with_database(settings, read_traffic))
    elif with_traffic is None and _at_hand(settings) and any(policy.budget for policy in report.checked):
        with suppress(typer.Exit):
            found += traffic_advice(report.checked, with_database(settings, read_traffic))
    return replace(report, warnings=(*report.warnings, *found))


def _at_hand(settings: Settings) -> bool:
    """Whether the ledger is the file in the data folder, and there."""
    return settings.storage.database_url is None and (settings.storage.data_dir / "tierline.db").exists()


def learnt(settings: Settings) -> Callable[[Policy], Chooser]:
    """What `tier: auto` of a policy chooses by, as the gateways have learnt. Ends where the database is away."""
    from gateway.ledger.rows import now_ms
    from gateway.outcomes import store
    from gateway.outcomes.service import learned
    from tiers.choose import choose

    counted = with_database(settings, lambda database: store.read(database, now_ms() // store.DAY_MS))

    def chosen_by(policy: Policy) -> Chooser:
        return choose if policy.document.learn == "off" else partial(choose, table=learned(counted, policy.name)[0])

    return chosen_by
