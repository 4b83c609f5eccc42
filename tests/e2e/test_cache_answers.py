"""The semantic cache through the front door: a reworded question is a hit, another question never is."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.conftest import Stack


@pytest.fixture(scope="module")
def http(tierline_stack: Stack) -> httpx.Client:
    """A client of a stack whose cache has loaded its embedder: before that, it answers exact look-ups only."""
    while json.loads(tierline_stack.cli("cache", "stats", "--json").stdout)["state"] == "warming":
        continue
    headers = {"authorization": f"Bearer {tierline_stack.key}"}
    return httpx.Client(base_url=tierline_stack.base_url, headers=headers, timeout=60)


def ask(http: httpx.Client, text: str, *, stream: bool = False, **headers: str) -> httpx.Response:
    body = {"model": "auto", "messages": [{"role": "user", "content": text}], "temperature": 0, "stream": stream}
    response = http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response


def test_exact_then_semantic_and_never_the_wrong_country(http: httpx.Client) -> None:
    first = ask(http, "What is the capital of Portugal?")
    assert first.headers["x-tierline-cache"] == "miss"
    again = ask(http, "What is the capital of Portugal?")
    assert again.headers["x-tierline-cache"] == "exact"
    assert again.headers["x-tierline-cost-usd"] == "0.000000000"
    assert again.json()["choices"] == first.json()["choices"]
    assert again.json()["id"] != first.json()["id"]
    reworded = ask(http, "What's the capital city of Portugal?")
    assert reworded.headers["x-tierline-cache"] == "semantic", reworded.headers["x-tierline-cache-reason"]
    assert float(reworded.headers["x-tierline-cache-score"]) > 0.8
    assert reworded.json()["choices"] == first.json()["choices"]
    for other in ("What is the capital of Spain?", "What is the currency of Portugal?"):
        assert ask(http, other).headers["x-tierline-cache"] == "miss"


def test_a_stored_answer_can_be_streamed(http: httpx.Client) -> None:
    whole = ask(http, "What is the capital of Norway?").json()["choices"][0]["message"]["content"]
    stream = ask(http, "What is the capital of Norway?", stream=True)
    assert stream.headers["x-tierline-cache"] == "exact"
    assert stream.text.rstrip().endswith("data: [DONE]")
    assert whole.split()[0] in stream.text


def test_the_client_can_be_stricter(http: httpx.Client) -> None:
    question = "What is the capital of Denmark?"
    ask(http, question)
    fresh = ask(http, question, **{"x-tierline-cache": "no-cache"})
    assert (fresh.headers["x-tierline-cache"], fresh.headers["x-tierline-cache-reason"]) == ("bypass", "no-cache")
    body = {"model": "auto", "messages": [{"role": "user", "content": "An unheard-of question about zebras?"}]}
    response = http.post("/v1/chat/completions", json=body, headers={"x-tierline-cache": "only-if-cached"})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "not_in_cache")


def test_auto_and_the_named_model_share_and_a_default_may_be_spelled_out(http: httpx.Client) -> None:
    """The shipped platform file sets the small model's default temperature to 0, so an unnamed one is that."""
    body = {"model": "auto", "messages": [{"role": "user", "content": "What is the capital of Iceland?"}]}
    outcomes = []
    for change in ({}, {"model": "smollm2-135m"}, {"temperature": 0, "seed": 3}, {"max_tokens": 1024}):
        response = http.post("/v1/chat/completions", json={**body, **change})
        outcomes.append(response.headers["x-tierline-cache"])
        assert response.json()["model"] == "smollm2-135m"
    assert outcomes == ["miss", "exact", "exact", "exact"]


def test_an_answer_that_was_cut_short_is_not_kept(http: httpx.Client) -> None:
    body = {
        "model": "auto",
        "messages": [{"role": "user", "content": "Tell me all about the history of bread"}],
        "max_tokens": 3,
    }
    for _ in range(2):
        response = http.post("/v1/chat/completions", json=body)
        assert response.json()["choices"][0]["finish_reason"] == "length"
        assert response.headers["x-tierline-cache"] == "miss"


def test_errors_of_the_engine_name_the_field(http: httpx.Client) -> None:
    body = {"model": "auto", "messages": [{"role": "user", "content": "Hello"}]}
    for change, code, param in (
        ({"top_k": "many"}, "invalid_type", "top_k"),
        ({"min_p": 7}, "invalid_value", "min_p"),
        ({"temprature": 1}, "unknown_parameter", "temprature"),
    ):
        response = http.post("/v1/chat/completions", json={**body, **change})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, code, param)


def test_identical_questions_at_once_cost_one_call(http: httpx.Client) -> None:
    question = "What is the capital of Finland, and what is it known for?"
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(http, question), range(8)))
    outcomes = sorted(answer.headers["x-tierline-cache"] for answer in answers)
    assert outcomes.count("miss") == 1
    assert outcomes.count("exact") == 7
