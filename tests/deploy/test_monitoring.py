"""Prometheus rules and the Grafana dashboard: valid, and only over metrics that Tierline really exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry

from engine.metrics import EngineMetrics
from gateway.backend_metrics import BackendCollector
from gateway.telemetry import Metrics
from gateway.worker_metrics import WORKER_UP

ROOT = Path(__file__).resolve().parents[2]

PROMETHEUS = ROOT / "deploy/prometheus"
DASHBOARD = ROOT / "deploy/grafana/dashboards/tierline.json"

# Exported only by an engine on a GPU; Prometheus itself makes `up`.
ELSEWHERE = {"up", "llm_gpu_memory_used_bytes", "llm_gpu_memory_total_bytes", "llm_gpu_utilization_percent"}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Every PromQL expression with the place where it stands; Grafana's variables are filled in."""
    for rule in rules():
        yield f"alert {rule['alert']}", rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*")


def exported() -> set[str]:
    """Series names of the gateway and of an engine, as their registries give them."""
    names: set[str] = {WORKER_UP}  # stands beside the registries of the workers
    backends = CollectorRegistry()
    backends.register(BackendCollector({}))
    for registry in (Metrics().registry, EngineMetrics("m").registry, backends):
        assert isinstance(registry, CollectorRegistry)
        for metric in registry.collect():
            names.add(metric.name)
            suffixes = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("_total",)}.get(metric.type, ())
            names |= {metric.name + suffix for suffix in suffixes}
    return names


def selectors(expression: Any) -> Iterator[Any]:
    """All vector selectors of a parsed expression."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in ("expr", "lhs", "rhs", "vector_selector", "vs"):
        if (child := getattr(expression, name, None)) is not None:
            yield from selectors(child)
    for child in getattr(expression, "args", None) or ():
        yield from selectors(child)


@pytest.mark.parametrize(("place", "query"), list(queries()))
def test_every_query_parses_and_asks_for_metrics_that_exist(place: str, query: str) -> None:
    found = {selector.name for selector in selectors(promql_parser.parse(query))}
    assert found, f"{place} asks for nothing"
    assert found <= exported() | ELSEWHERE, f"{place}: {found - exported() - ELSEWHERE}"


def test_the_three_alerts_of_the_contract_stand_as_promised() -> None:
    by_name = {rule["alert"]: rule for rule in rules()}
    latency, memory, cache = (by_name[name] for name in ("HighLatency", "HighGPUMemory", "LowCacheHitRate"))
    assert (latency["for"], memory["for"], cache["for"]) == ("5m", "1m", "10m")
    assert re.fullmatch(r"histogram_quantile\(0\.95, .*llm_ttft_seconds_bucket\[5m\].*\) > 5", latency["expr"])
    assert memory["expr"] == "llm_gpu_memory_used_bytes / llm_gpu_memory_total_bytes > 0.95"
    assert cache["expr"] == "llm_prefix_cache_hit_rate < 0.3"


def test_every_alert_says_how_urgent_it_is_and_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        assert len(rule["annotations"]["description"]) > 30


def test_every_alert_has_a_test_of_when_it_fires() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts.test.yml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules()}


@pytest.mark.parametrize(
    "arguments",
    [("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml"), ("test", "rules", "alerts.test.yml")],
)
def test_prometheus_own_tool_agrees(arguments: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here: install the Debian package prometheus")
    done = subprocess.run(
        [promtool, *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_has_no_overlaps_and_describes_its_data_source() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())
    uid = source["datasources"][0]["uid"]
    taken: dict[tuple[int, int], str] = {}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in dashboard["panels"]:
        area = panel["gridPos"]
        assert area["x"] + area["w"] <= 24
        for x in range(area["x"], area["x"] + area["w"]):
            for y in range(area["y"], area["y"] + area["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies over {taken[x, y]}"
                taken[x, y] = panel["title"]
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == uid


def test_the_dashboard_shows_the_metrics_of_the_contract() -> None:
    shown = DASHBOARD.read_text()
    for name in ("llm_ttft_seconds", "llm_tpot_seconds", "llm_tokens_per_second", "llm_requests_per_second",
                 "llm_gpu_memory_used_bytes", "llm_gpu_utilization_percent", "llm_prefix_cache_hit_rate"):  # fmt: skip
        assert name in shown


def test_grafana_reads_the_folder_that_compose_mounts() -> None:
    provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/tierline.yml").read_text())["providers"][
        0
    ]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    mounts = compose["services"]["grafana"]["volumes"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in mounts
