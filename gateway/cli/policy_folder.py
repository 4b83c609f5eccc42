"""Which policy folder a command is about, which tiers and models are served there, and what the ledger says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.cli.common import config_path, settings_or_exit, short, with_database

if TYPE_CHECKING:
    from gateway.settings import Settings
    from policies.check import Report


def environment(path: Path | None, config: Path | None) -> tuple[Path, list[str] | None, list[str] | None]:
    """The policy folder, and the tiers and models that are served; None where there is no configuration to ask."""
    if path is not None and config is None and not config_path(None).exists():
        return path, None, None
    settings = settings_or_exit(config)
    return path or Path(short(settings.policies_dir)), settings.tiers_served(), list(settings.models)


def advised(report: Report, settings: Settings, *, with_traffic: bool) -> Report:
    """The report with warnings that need the platform file, and the ledger where that is wanted."""
    from gateway.policy_advice import read_traffic, settings_advice, traffic_advice

    found = settings_advice(report.checked, settings)
    if with_traffic:
        found += traffic_advice(report.checked, with_database(settings, read_traffic))
    return replace(report, warnings=(*report.warnings, *found))
