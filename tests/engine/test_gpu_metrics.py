"""GPU metrics, with a stand-in for the driver's tool that prints what the real one prints."""

import sys

from prometheus_client import CollectorRegistry, generate_latest

from engine.gpu import Gpu, GpuMetrics, parse


def make_tool(path, text, code=0):
    path.write_text(f"#!{sys.executable}\nimport sys\nassert 'index,memory.used' in sys.argv[1]\n"
                    f"print({text!r})\nsys.exit({code})\n")  # fmt: skip
    path.chmod(0o755)
    return str(path)


def test_rows_are_read_in_bytes_and_unreported_values_stay_out():
    assert parse("0, 1024, 143771, 37\n1, 2, 4, [N/A]\nNo devices were found\n") == [
        Gpu("0", 1024 * 2**20, 143771 * 2**20, 37.0),
        Gpu("1", 2 * 2**20, 4 * 2**20, None),
    ]


async def test_the_gauges_have_the_names_that_the_alerts_use(tmp_path):
    registry = CollectorRegistry()
    metrics = GpuMetrics(registry, make_tool(tmp_path / "smi", "0, 512, 1024, 5\n1, 1, 1024, [N/A]"))
    await metrics.refresh()
    text = generate_latest(registry).decode()
    assert 'llm_gpu_memory_used_bytes{gpu_id="0"} 5.36870912e+08' in text
    assert 'llm_gpu_memory_total_bytes{gpu_id="1"} 1.073741824e+09' in text
    assert 'llm_gpu_utilization_percent{gpu_id="0"} 5.0' in text
    assert 'llm_gpu_utilization_percent{gpu_id="1"}' not in text


async def test_without_the_tool_there_is_nothing_and_a_failing_tool_is_logged(tmp_path, caplog):
    registry = CollectorRegistry()
    await GpuMetrics(registry, str(tmp_path / "missing")).refresh()
    assert generate_latest(registry) == b""
    await GpuMetrics(registry, make_tool(tmp_path / "smi", "driver mismatch", code=9)).refresh()
    assert "driver mismatch" in caplog.text
