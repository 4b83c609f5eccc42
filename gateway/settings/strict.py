"""The base of all settings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Base of all configuration: unknown keys are errors, instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)
