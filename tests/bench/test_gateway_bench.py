"""The gateway's benchmark: its parts are right, and it measures a gateway from end to end."""

from __future__ import annotations

import json
import sys

import pytest

from bench.load import percentiles_us
from bench.mock_upstream import behaviour


def test_percentiles_by_nearest_rank():
    assert percentiles_us([1000 * n for n in range(1, 101)]) == {"p50": 51, "p99": 100}
    assert percentiles_us([7000]) == {"p50": 7, "p99": 7}
    assert percentiles_us([]) == {"p50": 0, "p99": 0}


def test_behaviour_is_read_from_the_model_name():
    found = behaviour("status,status=429,retry_after=0.5,times=2")
    assert (found.kind, found.status, found.retry_after, found.times) == ("status", 429, "0.5", 2)
    assert behaviour("gpt-x,chunks=3").kind == "answer"
    with pytest.raises(ValueError, match="no_such"):
        behaviour("mock,no_such=1")


@pytest.mark.slow
def test_a_gateway_is_measured(tmp_path, monkeypatch):
    """The relay of the bench stands in for a peer, so its figures must be those of a working gateway."""
    from bench import gateway, report

    monkeypatch.setattr(gateway, "report", lambda name, rows: report.report(name, rows, tmp_path))
    port = gateway.free_port()
    command = f"{sys.executable} -m bench.passthrough {{upstream}} {port}"
    arguments = ["gateway", "--runs", "1", "--seconds", "0.4", "--command", command]
    monkeypatch.setattr(sys, "argv", [*arguments, "--url", f"http://127.0.0.1:{port}/v1"])
    gateway.main()
    rows = json.loads((tmp_path / "gateway.json").read_text())
    assert {row["system"] for row in rows} == {"direct", "passthrough", "peer"}
    for row in rows:
        if row["system"] == "peer" and row["metric"] in ("requests_per_second", "cpu_per_event", "cpu_per_request"):
            assert row["median"] > 0, row
