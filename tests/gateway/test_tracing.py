"""OpenTelemetry: a span per request by the GenAI conventions, a child of the caller's, without a word of the prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from bench.mock_upstream import MockUpstream
from gateway.settings import TelemetrySettings
from gateway.tracing import Tracing
from tests.gateway.front_door import configuration, front_door


async def test_spans_and_metrics_of_good_and_failed_requests(tmp_path: Path) -> None:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    settings = TelemetrySettings(legacy_token_metric=True)
    tracing = Tracing(settings, span_processor=SimpleSpanProcessor(exporter), metric_reader=reader)
    upstream = MockUpstream()
    await upstream.start()
    caller = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with front_door(tmp_path, configuration({"up": upstream}), tracing=tracing) as door:
        prompt = [{"role": "user", "content": "a very private aquamarine"}]
        await door.chat("auto", messages=prompt, headers={"traceparent": caller})
        await door.chat("auto", stream=True)
        upstream.override = "status,status=500"
        await door.chat("auto")
        data = reader.get_metrics_data()
    await upstream.stop()
    good, streamed, failed = exporter.get_finished_spans()

    assert good.name == "chat auto"
    assert good.context is not None
    assert format(good.context.trace_id, "032x") == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert good.attributes is not None
    assert good.attributes["gen_ai.operation.name"] == "chat"
    assert good.attributes["gen_ai.request.model"] == "auto"
    assert good.attributes["gen_ai.response.model"] == "mock"
    assert good.attributes["gen_ai.usage.input_tokens"] == 12
    assert good.attributes["gen_ai.usage.output_tokens"] == 34
    assert good.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert good.attributes["tierline.cost_usd"] == pytest.approx(0.00008)
    assert "aquamarine" not in good.to_json()
    assert streamed.attributes is not None
    assert streamed.attributes["gen_ai.usage.output_tokens"] == 34
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes is not None
    assert failed.attributes["error.type"] == "backend_upstream_error"

    assert data is not None
    metrics = {m.name: m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    assert {"gen_ai.client.token.usage", "gen_ai.client.operation.duration", "gen_ai.usage.tokens"} <= set(metrics)
    assert "gen_ai.server.time_to_first_token" in metrics


def test_without_an_endpoint_nothing_is_recorded() -> None:
    tracing = Tracing(TelemetrySettings())
    assert not tracing.enabled
    assert tracing.start("chat", "auto", {}) is None
    tracing.close()
