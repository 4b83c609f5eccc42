"""GPU metrics, with stand-ins for the driver's tool, which prints what the real one prints, and for its library."""

import sys
import types
from pathlib import Path

import pynvml
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine.gpu import Gpu, GpuMetrics, Nvml, Tool, find_source, parse


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
    metrics = GpuMetrics(registry, Tool(make_tool(tmp_path / "smi", "0, 512, 1024, 5\n1, 1, 1024, [N/A]")).ask)
    await metrics.refresh()
    text = generate_latest(registry).decode()
    assert 'llm_gpu_memory_used_bytes{gpu_id="0"} 5.36870912e+08' in text
    assert 'llm_gpu_memory_total_bytes{gpu_id="1"} 1.073741824e+09' in text
    assert 'llm_gpu_utilization_percent{gpu_id="0"} 5.0' in text
    assert 'llm_gpu_utilization_percent{gpu_id="1"}' not in text


async def test_without_the_tool_there_is_nothing_and_a_failing_tool_is_logged(tmp_path, caplog):
    registry = CollectorRegistry()
    await GpuMetrics(registry, None).refresh()
    assert generate_latest(registry) == b""
    await GpuMetrics(registry, Tool(make_tool(tmp_path / "smi", "driver mismatch", code=9)).ask).refresh()
    assert "driver mismatch" in caplog.text


class DriverLibrary(types.SimpleNamespace):
    """A stand-in for `pynvml` on a machine with two GPUs, the second of which is partitioned."""

    NVMLError = pynvml.NVMLError

    def nvmlInit(self):
        self.started = True

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(used=7 + handle, total=143 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle):
        if handle == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return types.SimpleNamespace(gpu=42)


async def test_nvml_gives_the_same_without_a_process():
    library = DriverLibrary()
    assert await Nvml(library).ask() == [Gpu("0", 7.0, 143 << 30, 42.0), Gpu("1", 8.0, 143 << 30, None)]
    assert library.started


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver")
def test_without_a_driver_the_tool_is_asked_and_without_a_tool_nobody(tmp_path):
    """With the real library, which finds no driver here."""
    tool = make_tool(tmp_path / "smi", "")
    assert find_source(tool).__self__._path == tool
    assert find_source(str(tmp_path / "missing")) is None
