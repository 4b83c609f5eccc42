"""Benchmark results keep their form: what is reported can be read back, and nonsense is refused."""

import json
from pathlib import Path

import pytest

from bench.report import Row, report


def test_rows_are_written_as_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = Row.of("requests_per_second", "tierline", "connections=64", "1/s", [3.0, 1.0, 2.5])
    path = report("gateway", [row], tmp_path / "results")
    assert path == tmp_path / "results" / "gateway.json"
    assert json.loads(path.read_text()) == [
        {
            "metric": "requests_per_second",
            "system": "tierline",
            "setting": "connections=64",
            "unit": "1/s",
            "median": 2.5,
            "min": 1.0,
            "max": 3.0,
            "runs": 3,
        }
    ]
    assert "requests" in capsys.readouterr().out


def test_a_report_without_runs_or_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run of ttft"):
        Row.of("ttft", "tierline", "", "ms", [])
    with pytest.raises(ValueError, match="measured nothing"):
        report("gateway", [], tmp_path)
    with pytest.raises(ValueError, match="report name"):
        report("../gateway", [Row.of("ttft", "tierline", "", "ms", [1.0])], tmp_path)
