"""One server process with the real small model, shared by all tests of the engine's HTTP side."""

import pytest

from tests.engine.serving import Server


@pytest.fixture(scope="session")
def server(smollm2_path):
    server = Server(smollm2_path, "--max-num-seqs", "64", "--kv-cache-bytes", str(400 << 20)).wait_ready()
    yield server
    assert server.stop() == 0
