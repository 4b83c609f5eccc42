"""What the server refuses, and how it says so."""

import socket

import pytest

from tests.engine.serving import FRANCE

CHAT_REFUSALS = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "unsupported_parameter"),
    ({"functions": [{"name": "f"}]}, "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, "unsupported_parameter"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "unsupported_parameter"),
    ({"structured_outputs": {"regex": "a+"}}, "unsupported_parameter"),
    ({"audio": {"voice": "x", "format": "wav"}}, "unsupported_parameter"),
    ({"modalities": ["text", "audio"]}, "unsupported_parameter"),
    ({"prediction": {"type": "content", "content": "x"}}, "unsupported_parameter"),
    ({"priority": 5}, "unsupported_parameter"),
    ({"reasoning_effort": "high"}, "unsupported_parameter"),
    ({"store": True}, "unsupported_parameter"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "unsupported_parameter"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "unsupported_parameter"),
    ({"messages": []}, "empty_array"),
    ({"messages": "hi"}, "invalid_type"),
    ({"temperature": 3}, "invalid_value"),
    ({"temperature": "hot"}, "invalid_type"),
    ({"top_k": -2}, "invalid_value"),
    ({"min_p": 2}, "invalid_value"),
    ({"repetition_penalty": 0}, "invalid_value"),
    ({"min_tokens": 9, "max_tokens": 3}, "invalid_value"),
    ({"stop_token_ids": [10**8]}, "invalid_value"),
    ({"logit_bias": {"99999999": 1}}, "invalid_value"),
    ({"top_logprobs": 2}, "invalid_value"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "invalid_value"),
    ({"max_tokens": 0}, "invalid_value"),
    ({"n": 0}, "invalid_value"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "array_too_long"),
    ({"cache_salt": ""}, "invalid_value"),
    ({"temprature": 1}, "unknown_parameter"),
    ({"stream": True, "stream_options": {"include_usages": True}}, "unknown_parameter"),
]


@pytest.mark.parametrize(("change", "code"), CHAT_REFUSALS)
def test_what_is_not_honoured_is_refused(server, change, code):
    response = server.post("/v1/chat/completions", **{"messages": FRANCE, **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"suffix": "x"}, "unsupported_parameter"),
        ({"best_of": 3}, "unsupported_parameter"),
        ({"echo": True, "logprobs": 1}, "unsupported_parameter"),
        ({"logprobs": 21}, "invalid_value"),
        ({"messages": FRANCE}, "unknown_parameter"),
        ({"prompt": {"a": 1}}, "invalid_type"),
    ],
)
def test_what_completions_do_not_honour_is_refused(server, change, code):
    response = server.post("/v1/completions", **{"prompt": "x", **change})
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)


def test_an_unknown_parameter_gets_a_suggestion(server):
    response = server.post("/v1/chat/completions", messages=FRANCE, temprature=1)
    assert "Did you mean 'temperature'?" in response.json()["error"]["message"]


def test_wrong_bodies_paths_methods_and_models(server):
    post = server.http.post
    assert post("/v1/chat/completions", content=b"{oops").json()["error"]["code"] == "invalid_json"
    assert post("/v1/chat/completions", content=b"[1]").status_code == 400
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    other = post("/v1/chat/completions", json={"model": "gpt-5", "messages": FRANCE})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    assert server.http.get("/nothing").json()["error"]["code"] == "not_found"
    assert server.http.get("/v1/chat/completions").json()["error"]["code"] == "method_not_allowed"


def test_a_prompt_that_can_never_fit_is_a_400_with_the_numbers_streaming_or_not(server):
    for stream in (False, True):
        response = server.post("/v1/completions", prompt=[5] * 1024, stream=stream)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "1024 tokens" in response.json()["error"]["message"]
    fits = server.complete([5] * 1020, max_tokens=100, ignore_eos=True)
    assert fits["usage"]["completion_tokens"] == 4, "the context ends here"
    assert fits["choices"][0]["finish_reason"] == "length"


def test_too_many_answers_at_once_can_never_fit(server):
    response = server.post("/v1/completions", prompt=["x"] * 400, max_tokens=1)
    assert response.status_code == 400
    assert "400 answers" in response.json()["error"]["message"]
