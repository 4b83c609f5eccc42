"""The base of all settings, and the types of what is sent, logged and kept under a name."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from backends.connection import Origin
from backends.endpoint import header_name, header_value
from policies.schema.base import ONE_LINE, Name


def _base_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"a base URL starts with http:// or https://, got {url!r}")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"a base URL is ASCII without blanks, got {url!r}")
    Origin(url)
    return url


ModelName = Annotated[str, Field(min_length=1, max_length=256), ONE_LINE]
BackendName = Annotated[str, Field(min_length=1, max_length=128), ONE_LINE]
PriceVersion = Annotated[str, Field(min_length=1, max_length=64), ONE_LINE]
EngineName = Name  # it names the process and the file of its log
HeaderName = Annotated[str, Field(max_length=128), AfterValidator(header_name)]
HeaderValue = Annotated[str, Field(max_length=4096), AfterValidator(header_value)]
BaseUrl = Annotated[str, Field(max_length=2048), AfterValidator(_base_url)]


class Strict(BaseModel):
    """Base of all configuration: unknown keys are errors, instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
