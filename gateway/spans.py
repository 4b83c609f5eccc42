"""What `tracing.py` says, put into OpenTelemetry's spans and metrics and exported over OTLP/HTTP.

Imported only where traces go somewhere: the SDK takes three megabytes of every process that has it.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import propagate, trace
from opentelemetry.metrics import Histogram, MeterProvider
from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from gateway.settings import TelemetrySettings
from gateway.tracing import Finished, MissingExporter, TracedLeg


class Spans:
    """Spans and metrics of one process. `span_processor` and `metric_reader` replace the OTLP exporters.

    Raises:
        MissingExporter: there is an endpoint and no exporter.
    """

    def __init__(
        self, settings: TelemetrySettings, span_processor: SpanProcessor | None, metric_reader: MetricReader | None
    ) -> None:
        if span_processor is None:
            span_processor, metric_reader = _otlp(str(settings.otlp_endpoint))
        resource = Resource.create({"service.name": settings.service_name})
        self._traces = TracerProvider(
            resource=resource, sampler=ParentBased(TraceIdRatioBased(settings.trace_sample_ratio))
        )
        self._traces.add_span_processor(span_processor)
        self._meters: MeterProvider = SdkMeterProvider(
            metric_readers=[metric_reader] if metric_reader else [], resource=resource
        )
        self._tracer = self._traces.get_tracer("tierline")
        meter = self._meters.get_meter("tierline")
        self._token_usage = meter.create_histogram("gen_ai.client.token.usage", unit="{token}")
        self._duration = meter.create_histogram("gen_ai.client.operation.duration", unit="s")
        self._first_token = meter.create_histogram("gen_ai.server.time_to_first_token", unit="s")
        self._legacy: Histogram | None = None
        if settings.legacy_token_metric:
            self._legacy = meter.create_histogram("gen_ai.usage.tokens", unit="{token}")

    def start(self, operation: str, model: str, headers: Mapping[str, str]) -> Span:
        """Begin the span of a request, as a child of the caller's if `headers` carry a `traceparent`."""
        return self._tracer.start_span(f"{operation} {model}", context=propagate.extract(headers), kind=SpanKind.SERVER)

    def finish(self, span: Span, done: Finished) -> None:
        """End the span and record the metrics."""
        labels = {
            "gen_ai.operation.name": done.operation,
            "gen_ai.provider.name": done.provider,
            "gen_ai.request.model": done.requested_model,
        }
        if done.model:
            labels["gen_ai.response.model"] = done.model
        for name, value in labels.items():
            span.set_attribute(name, value)
        span.set_attribute("gen_ai.usage.input_tokens", done.input_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", done.output_tokens)
        if done.finish_reasons:
            span.set_attribute("gen_ai.response.finish_reasons", list(done.finish_reasons))
        for name, attribute in done.attributes.items():
            span.set_attribute(f"tierline.{name}", attribute)
        for leg in done.legs:
            self._add(span, leg)
        if done.error:
            span.set_attribute("error.type", done.error)
            span.set_status(Status(StatusCode.ERROR, done.error))
            labels["error.type"] = done.error
        span.end()
        self._duration.record(done.duration_s, labels)
        if done.ttft_s is not None:
            self._first_token.record(done.ttft_s, labels)
        for kind, amount in (("input", done.input_tokens), ("output", done.output_tokens)):
            self._token_usage.record(amount, {**labels, "gen_ai.token.type": kind})
            if self._legacy is not None:
                self._legacy.record(amount, {**labels, "gen_ai.token.type": kind})

    def _add(self, parent: Span, leg: TracedLeg) -> None:
        start = int(leg.started_at * 1e9)
        context = trace.set_span_in_context(parent)
        span = self._tracer.start_span(leg.name, context=context, kind=SpanKind.CLIENT, start_time=start)
        for name, attribute in leg.attributes.items():
            span.set_attribute(f"tierline.{name}", attribute)
        if leg.error:
            span.set_status(Status(StatusCode.ERROR, leg.error))
        span.end(end_time=start + int(leg.seconds * 1e9))

    def close(self) -> None:
        """Send what is left and stop."""
        self._traces.shutdown()
        if isinstance(self._meters, SdkMeterProvider):
            self._meters.shutdown()


def _otlp(endpoint: str) -> tuple[SpanProcessor, MetricReader]:
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise MissingExporter(
            "telemetry.otlp_endpoint needs the OTLP exporter: pip install 'tierline[otlp]'."
        ) from None
    base = endpoint.rstrip("/")
    return (
        BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{base}/v1/traces")),
        PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=f"{base}/v1/metrics")),
    )
