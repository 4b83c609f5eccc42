"""`tierline.yaml`, the platform engineer's file: listeners, storage, tiers, models, backends, engines, cache.

Unknown keys are refused with file, line and a suggestion. Relative paths are relative to the file. Secrets never
stand in the file: a backend names the environment variable that holds its key. Start reading in `platform_file.py`.
"""

from gateway.settings.batches import BatchSettings
from gateway.settings.limits import ConcurrencySettings, LimitSettings, WhenRedisIsDown
from gateway.settings.platform_file import Settings, load, resolve, where
from gateway.settings.process import AdminSettings, LogSettings, ServerSettings, TelemetrySettings
from gateway.settings.routing import RoutingSettings
from gateway.settings.serving import (
    BackendSettings,
    Capability,
    EngineSettings,
    FailoverSettings,
    HedgeSettings,
    ModelSettings,
    Price,
    SamplingDefaults,
    TierName,
    Timeouts,
)
from gateway.settings.storage import CacheSettings, IdempotencySettings, ResponsesSettings, StorageSettings
from gateway.settings.strict import Strict

__all__ = [
    "AdminSettings",
    "BackendSettings",
    "BatchSettings",
    "CacheSettings",
    "Capability",
    "ConcurrencySettings",
    "EngineSettings",
    "FailoverSettings",
    "HedgeSettings",
    "IdempotencySettings",
    "LimitSettings",
    "LogSettings",
    "ModelSettings",
    "Price",
    "ResponsesSettings",
    "RoutingSettings",
    "SamplingDefaults",
    "ServerSettings",
    "Settings",
    "StorageSettings",
    "Strict",
    "TelemetrySettings",
    "TierName",
    "Timeouts",
    "WhenRedisIsDown",
    "load",
    "resolve",
    "where",
]
