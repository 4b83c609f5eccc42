"""Which policy folder a command is about, and which tiers and models are served there."""

from __future__ import annotations

from pathlib import Path

from gateway.cli.common import config_path, settings_or_exit, short


def environment(path: Path | None, config: Path | None) -> tuple[Path, list[str] | None, list[str] | None]:
    """The policy folder, and the tiers and models that are served; None where there is no configuration to ask."""
    if path is not None and config is None and not config_path(None).exists():
        return path, None, None
    settings = settings_or_exit(config)
    return path or Path(short(settings.policies_dir)), settings.tiers_served(), list(settings.models)
