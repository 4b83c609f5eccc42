"""What the card itself does: how fast it copies memory and multiplies matrices. Everything is held against that."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.gpu.figures import Figure, seconds

_FILE = "rates.json"


@dataclass(frozen=True, slots=True)
class Card:
    """Measured rates. `copy`: bytes read and written per second; `bf16`, `fp8`: operations on floats per second."""

    name: str
    versions: str
    copy: float
    bf16: float
    fp8: float

    def save(self, folder: Path) -> None:
        """For the other parts of the check."""
        (folder / _FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Card:
        """What `save` wrote. Raises FileNotFoundError where it was not measured."""
        return cls(**json.loads((folder / _FILE).read_text()))

    def figures(self) -> list[Figure]:
        """For the table."""
        return [
            Figure("copy", self.name, "TB/s", self.copy / 1e12, system="card"),
            Figure("matrix_rate", f"{self.name} bfloat16", "TFLOP/s", self.bf16 / 1e12, system="card"),
            Figure("matrix_rate", f"{self.name} float8", "TFLOP/s", self.fp8 / 1e12, system="card"),
        ]


def measure(device: torch.device, *, dry: bool) -> Card:
    """Measure this card. `dry`: tiny sizes. Where it has no products of float8, their rate is that of bfloat16."""
    import triton

    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else platform.machine()
    source = torch.empty(1 << (16 if dry else 31), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / seconds(lambda: target.copy_(source), device)
    n = 64 if dry else 8192
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    bf16 = 2 * n**3 / seconds(lambda: a @ b, device)
    fp8 = bf16
    if on_gpu and torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.ones((), device=device)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        fp8 = (
            2
            * n**3
            / seconds(lambda: torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16), device)
        )
    return Card(name, f"torch {torch.__version__}, Triton {triton.__version__}", copied, bf16, fp8)
