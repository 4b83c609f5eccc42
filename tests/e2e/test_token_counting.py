"""The bundled engine counts what it would bill: the chat template's own tokens are in."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.conftest import Stack


@pytest.mark.parametrize("text", ["Hi", "Wie heißt die Hauptstadt von Frankreich? 😀"])
@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("prefill", [None, "The capital of"])
def test_the_count_is_what_the_answer_reports(
    tierline_stack: Stack, text: str, system: str | None, prefill: str | None
) -> None:
    request: dict[str, Any] = {"model": "smollm2-135m", "messages": [{"role": "user", "content": text}]}
    if prefill:
        request["messages"].append({"role": "assistant", "content": prefill})
    if system:
        request["system"] = system
    with anthropic.Anthropic(base_url=tierline_stack.base_url, api_key=tierline_stack.key, max_retries=0) as client:
        raw = client.messages.with_raw_response.count_tokens(**request)
        answer = client.messages.create(max_tokens=1, **request)
    assert raw.headers["x-tierline-count"] == "counted"
    usage = answer.usage
    assert raw.parse().input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
