"""An engine that begins each step before the one before it is over answers as one that does not, over HTTP."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.serving import FRANCE, Server

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
REQUESTS: list[dict[str, Any]] = [
    {"messages": FRANCE, "max_tokens": 20, "temperature": 0},
    {"messages": FRANCE, "max_tokens": 24, "seed": 3, "logprobs": True, "frequency_penalty": 0.8},
    {"messages": FRANCE, "max_tokens": 30, "temperature": 0, "stop": ["Paris"]},
    {"messages": FRANCE, "max_tokens": 12, "n": 3, "seed": 5},
    {"messages": FRANCE, "max_tokens": 30, "seed": 7, "structured_outputs": {"json": SCHEMA}},
]


def said(server: Server) -> list[Any]:
    """Texts and reasons of all requests, sent at once."""

    def ask(body: dict[str, Any]) -> list[tuple[str, str]]:
        response = server.post("/v1/chat/completions", **body)
        assert response.status_code == 200, response.text
        return [(choice["message"]["content"], choice["finish_reason"]) for choice in response.json()["choices"]]

    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        return list(threads.map(ask, REQUESTS))


@pytest.mark.slow
def test_answers_are_the_same_with_and_without_overlap(smollm2_path: Path) -> None:
    found = []
    for options in ([], ["--overlap"]):
        server = Server(smollm2_path, *options).wait_ready()
        found.append(said(server))
        server.wait_idle()
        assert server.pages("used") == 0
        assert server.stop() == 0
    assert found[0] == found[1]
    assert {reason for choices in found[0] for _, reason in choices} == {"stop", "length"}
