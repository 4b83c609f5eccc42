"""The replay of a trace: the same every time, everything answered, and prefixes found where the rule looks for them."""

from __future__ import annotations

import json
import random

import pytest

from bench.placement_trace import BLOCK, SYSTEMS, read, replay


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Conversations of some turns each, in between each other."""
    rng, path, blocks = random.Random(5), tmp_path_factory.mktemp("trace") / "small.jsonl", iter(range(1, 100_000))
    turns: list[list[int]] = [[0, next(blocks)] for _ in range(12)]
    lines = []
    for number in range(150):
        turn = rng.choice(turns)
        turn.append(next(blocks))
        length = len(turn) * BLOCK - 100
        lines.append({"timestamp": number * 400, "input_length": length, "output_length": 100, "hash_ids": list(turn)})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read(path)


def test_placement_finds_prefixes_and_rules_that_do_not_look_for_them_find_fewer(trace):
    found = {kind: replay(trace, kind, 4, 1.0) for kind in SYSTEMS}
    for kind in ("tierline_sent", "tierline_events"):
        assert found[kind].hit_share > 1.3 * found["random"].hit_share
        assert found[kind].ttft_p99_s < found["random"].ttft_p99_s
    assert replay(trace, "tierline_events", 4, 1.0) == found["tierline_events"]


def test_gateways_that_know_each_other_not_find_what_engines_tell(trace):
    told = replay(trace, "tierline_events", 4, 1.0, gateways=3)
    guessed = replay(trace, "tierline_sent", 4, 1.0, gateways=3)
    assert told.hit_share > guessed.hit_share


def test_a_folder_without_a_trace_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no \.jsonl file"):
        read(tmp_path)
