"""The benchmark of the engine's memory, with few requests: it runs, aborts happen, the law of pages holds."""

import pytest

from bench.engine_memory import Checkpoint, rows, run, write_tiny_model


async def test_memory_and_pages_over_requests_and_aborts(tmp_path):
    write_tiny_model(tmp_path)
    found = await run(tmp_path, 240, 60)
    assert [one.requests for one in found] == [0, 60, 120, 180, 240]
    assert found[-1].aborts > 20
    assert found[-1].pages_cached > 0
    growth = found[-1].core_bytes + found[-1].server_bytes - found[2].core_bytes - found[2].server_bytes
    assert growth < 16 << 20, "a leak of pages or of answers would be larger"


def test_growth_is_told_of_the_second_half():
    found = [Checkpoint(10 * i, 100 + i, 1000 + 2 * i, 3, i) for i in range(5)]
    told = {(row.metric, row.system): row for row in rows(found)}
    assert told["growth_bytes", "tierline server"].median == 2
    assert told["growth_bytes", "tierline core"].median == 4
    assert told["growth_bytes", "tierline core"].setting == "requests=20..40"
    assert told["aborts", "tierline"].median == pytest.approx(4)
