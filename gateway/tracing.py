"""OpenTelemetry spans and metrics of the GenAI conventions, exported over OTLP/HTTP when an endpoint is configured.

Without an endpoint nothing is recorded, OpenTelemetry is not even imported (`spans.py` does that), and a request pays
for one attribute look-up. Prompts and answers are never attributes. A caller's `traceparent` is continued.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.settings import TelemetrySettings

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

    from gateway.spans import Spans


@dataclass(frozen=True, slots=True)
class TracedLeg:
    """A part of an attempt that is a span of its own. `started_at`: Unix seconds."""

    name: str
    started_at: float
    seconds: float
    attributes: Mapping[str, str | int]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """What a span and the metrics say of a finished request."""

    operation: str
    requested_model: str
    model: str | None
    provider: str
    finish_reasons: tuple[str, ...]
    input_tokens: int
    output_tokens: int
    duration_s: float
    ttft_s: float | None
    error: str | None
    attributes: Mapping[str, str | int | float | bool]
    legs: tuple[TracedLeg, ...] = ()


class MissingExporter(ValueError):
    """`telemetry.otlp_endpoint` is set, but the exporter is not installed."""


class Tracing:
    """Spans and metrics of one process. `enabled` is False when nothing would leave the process."""

    def __init__(
        self,
        settings: TelemetrySettings,
        *,
        span_processor: SpanProcessor | None = None,
        metric_reader: MetricReader | None = None,
    ) -> None:
        """`span_processor` and `metric_reader` replace the OTLP exporters, for tests and other exporters.

        Raises:
            MissingExporter: there is an endpoint and no exporter.
        """
        self._spans: Spans | None = None
        if settings.otlp_endpoint or span_processor is not None:
            from gateway.spans import Spans

            self._spans = Spans(settings, span_processor, metric_reader)
        self.enabled = self._spans is not None

    def start(self, operation: str, model: str, headers: Mapping[str, str]) -> Span | None:
        """Begin the span of a request, as a child of the caller's if `headers` carry a `traceparent`."""
        return None if self._spans is None else self._spans.start(operation, model, headers)

    def finish(self, span: Span, done: Finished) -> None:
        """End the span and record the metrics."""
        if self._spans is not None:
            self._spans.finish(span, done)

    def close(self) -> None:
        """Send what is left and stop."""
        if self._spans is not None:
            self._spans.close()
