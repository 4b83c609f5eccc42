"""The replicas of a backend, one by one, and which of them a request goes to."""

from __future__ import annotations

from typing import Literal, Self
from zoneinfo import ZoneInfo

from pydantic import Field, field_validator, model_validator

from backends.placement.hours import Hours
from backends.placement.place import Place, Preferences
from gateway.settings.strict import BaseUrl, Strict
from policies.schema.base import Name

Role = Literal["both", "prefill", "decode"]


class ReplicaSettings(Strict):
    """One address of a backend, or one bundled engine, and what is special about it."""

    url: BaseUrl | None = Field(None, description="Its address, ending in /v1.")
    engine: str | None = Field(None, description="In place of a url: a name under 'engines'.")
    role: Role = Field(
        "both", description="prefill: it computes long prompts for those that decode, and answers nobody."
    )
    group: Literal["short", "long"] | None = Field(None, description="Prompts that it is for; default: all.")
    max_prompt_tokens: int | None = Field(None, ge=1, description="Longer prompts do not go there.")
    weight: float = Field(1.0, gt=0, le=1000, description="Its share where all else is equal.")
    region: Name | None = None
    pool: Literal["on_demand", "spot", "overflow"] = "on_demand"
    hours: str | None = Field(
        None, max_length=200, description="When it works, such as 'Mon-Fri 08-18'; default: always."
    )
    price_factor: float = Field(1.0, gt=0, le=1000, description="How dear it is beside the others.")

    @field_validator("hours")
    @classmethod
    def _are_hours(cls, text: str | None) -> str | None:
        if text is not None:
            Hours(text, ZoneInfo("UTC"))
        return text

    @model_validator(mode="after")
    def _one_address(self) -> Self:
        if (self.url is None) == (self.engine is None):
            raise ValueError("a replica has either a 'url' or an 'engine'")
        return self

    def place(self, zone: ZoneInfo) -> Place:
        return Place(
            group=self.group,
            max_prompt_tokens=self.max_prompt_tokens,
            weight=self.weight,
            region=self.region,
            pool=self.pool,
            hours=None if self.hours is None else Hours(self.hours, zone),
            price_factor=self.price_factor,
            fetches=self.role == "decode",
        )


class PlacementSettings(Strict):
    """How a request finds its replica."""

    prefix: Literal["sent", "events", "off"] = Field(
        "sent",
        description="Who holds a prompt's beginning: by what was sent where, by what engines tell, or no matter.",
    )
    remember_s: float = Field(600.0, gt=0, description="How long a server is taken to keep what was sent to it.")
    remember_tokens: int = Field(1_000_000, ge=1, description="How many tokens of it.")
    long_from_tokens: int | None = Field(None, ge=1, description="From how many tokens on a prompt is long.")
    regions: tuple[Name, ...] = Field((), description="The nearest first.")
    overflow_at: float = Field(0.8, gt=0, le=1, description="Share of max_outstanding from which others are asked.")
    prefill_from_tokens: int = Field(
        1024, ge=1, description="From how many tokens on that its replica lacks a prompt is computed by one for that."
    )
    prefill_timeout_s: float = Field(20.0, gt=0, description="Then the replica that answers computes it itself.")
    time_zone: str = Field("UTC", description="Of all hours, such as Europe/Berlin.")

    @field_validator("time_zone")
    @classmethod
    def _is_a_zone(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (OSError, ValueError) as error:  # ZoneInfoNotFoundError is a KeyError
            raise ValueError(f"there is no time zone {name!r}") from error
        except KeyError as error:
            raise ValueError(f"there is no time zone {name!r}; they are called like Europe/Berlin") from error
        return name

    def zone(self) -> ZoneInfo:
        return ZoneInfo(self.time_zone)

    def preferences(self) -> Preferences:
        return Preferences(self.long_from_tokens, self.regions, self.overflow_at)


def check_placement(replicas: tuple[ReplicaSettings, ...], placement: PlacementSettings) -> None:
    """What only both together can tell.

    Raises:
        ValueError: a setting that would have no effect, or an address twice.
    """
    _check_roles(replicas, placement)
    groups = {replica.group for replica in replicas if replica.group}
    if groups and placement.long_from_tokens is None:
        raise ValueError("a replica has a 'group': say from when on a prompt is long, by placement.long_from_tokens")
    if placement.long_from_tokens is not None and not groups:
        raise ValueError("placement.long_from_tokens has no effect: no replica has a 'group'")
    regions = {replica.region for replica in replicas if replica.region}
    if regions - set(placement.regions):
        missing = ", ".join(sorted(regions - set(placement.regions)))
        raise ValueError(f"placement.regions, which says what is near, lacks {missing}")
    if len(set(placement.regions)) < len(placement.regions):
        raise ValueError("placement.regions has a region twice")
    if unknown := [region for region in placement.regions if region not in regions]:
        raise ValueError(f"placement.regions: no replica is in {', '.join(unknown)}")
    addresses = [(replica.url or "").rstrip("/") or replica.engine for replica in replicas]
    if len(set(addresses)) < len(addresses):
        raise ValueError("'replicas' has an address twice")


def _check_roles(replicas: tuple[ReplicaSettings, ...], placement: PlacementSettings) -> None:
    """Raises ValueError for roles that need each other, and for settings that only they would use."""
    roles = {replica.role for replica in replicas}
    if ("prefill" in roles) != ("decode" in roles):
        raise ValueError("replicas of the roles 'prefill' and 'decode' need each other")
    unused = placement.model_fields_set & {"prefill_from_tokens", "prefill_timeout_s"}
    if unused and "prefill" not in roles:
        raise ValueError(f"placement.{min(unused)} has no effect: no replica has the role 'prefill'")
