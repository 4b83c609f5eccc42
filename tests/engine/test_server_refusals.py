"""What the server refuses, and how it says so."""

import socket

import pytest

from tests.engine.serving import FRANCE

TEXT = {"type": "text", "text": "What is this?"}
REFUSAL = {"type": "refusal", "refusal": "No."}
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT_REFUSALS = [
    ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "invalid_value", "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "invalid_value", "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "invalid_value", "tools[1].function.name"),
    ({"tools": [TOOL], "tool_choice": "always"}, "invalid_value", "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "invalid_value",
        "tool_choice.function.name",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [TOOL]}}},
        "invalid_value",
        "tool_choice.allowed_tools.mode",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "invalid_value",
        "tool_choice.allowed_tools.tools",
    ),
    (
        {
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [TOOL, {"type": "function", "function": {"name": "g"}}]},
            },
        },
        "invalid_value",
        "tool_choice.allowed_tools.tools[1].function.name",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
        "invalid_grammar",
        "tools",
    ),
    ({"parallel_tool_calls": False}, "invalid_value", "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "invalid_type", "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://127.0.0.1:1/x"}}}},
        "invalid_grammar",
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "structural_tag"}}, "invalid_type", "response_format"),
    ({"structured_outputs": {"regex": "a("}}, "invalid_grammar", "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "invalid_type", "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "invalid_type", "structured_outputs.choice"),
    ({"guided_choice": ["a", ""]}, "invalid_value", "guided_choice[1]"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "array_too_long", "stop"),
    ({"structured_outputs": {"json": "{"}}, "invalid_value", "structured_outputs.json"),
    (
        {"structured_outputs": {"whitespace_pattern": " "}},
        "unsupported_parameter",
        "structured_outputs.whitespace_pattern",
    ),
    ({"guided_grammar": "start: nobody"}, "invalid_grammar", "guided_grammar"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "invalid_value", "guided_regex"),
    ({"guided_regex": "a", "use_beam_search": True, "beam_width": 2}, "invalid_value", "guided_regex"),
    ({"audio": {"voice": "x", "format": "wav"}}, "unsupported_parameter", "audio"),
    ({"modalities": ["text", "audio"]}, "unsupported_parameter", "modalities"),
    ({"prediction": {"type": "content", "content": "x"}}, "unsupported_parameter", "prediction"),
    ({"priority": 101}, "invalid_value", "priority"),
    ({"tenant": ""}, "invalid_value", "tenant"),
    ({"deadline_ms": 0}, "invalid_value", "deadline_ms"),
    ({"reasoning_effort": "high"}, "unsupported_parameter", "reasoning_effort"),
    ({"store": True}, "unsupported_parameter", "store"),
    (
        {"messages": [*FRANCE, {"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {}}]}]},
        "unsupported_parameter",
        "messages[1].content[1]",
    ),
    ({"messages": [{"role": "user", "content": [REFUSAL]}]}, "unsupported_parameter", "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "invalid_type", "messages[0].content[0].text"),
    (
        {"messages": [{"role": "function", "content": "x", "name": "f"}]},
        "unsupported_parameter",
        "messages[0].role",
    ),
    (
        {"messages": [*FRANCE, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "missing_required_parameter",
        "messages[1].tool_calls[0].function.name",
    ),
    ({"messages": []}, "empty_array", "messages"),
    ({"messages": "hi"}, "invalid_type", "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_type", "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "missing_required_parameter", "messages[0].role"),
    ({"temperature": 3}, "invalid_value", "temperature"),
    ({"temperature": "hot"}, "invalid_type", "temperature"),
    ({"top_k": -2}, "invalid_value", "top_k"),
    ({"top_k": "many"}, "invalid_type", "top_k"),
    ({"min_p": 2}, "invalid_value", "min_p"),
    ({"min_p": [0.1]}, "invalid_type", "min_p"),
    ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "invalid_value", "repetition_penalty"),
    ({"repetition_penalty": True}, "invalid_type", "repetition_penalty"),
    ({"min_tokens": 9, "max_tokens": 3}, "invalid_value", "min_tokens"),
    ({"min_tokens": 1.5}, "invalid_type", "min_tokens"),
    ({"ignore_eos": "yes"}, "invalid_type", "ignore_eos"),
    ({"stop_token_ids": [10**8]}, "invalid_value", "stop_token_ids"),
    ({"stop_token_ids": [2, "x"]}, "invalid_type", "stop_token_ids[1]"),
    ({"messages": FRANCE * 10_001}, "array_too_long", "messages"),
    ({"logit_bias": {str(i): 1 for i in range(4097)}}, "array_too_long", "logit_bias"),
    ({"stop_token_ids": [2] * 4097}, "array_too_long", "stop_token_ids"),
    ({"logit_bias": {"99999999": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"²": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"9": "much"}}, "invalid_type", "logit_bias"),
    ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "invalid_value", "max_tokens"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"n": 0}, "invalid_value", "n"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "array_too_long", "stop"),
    ({"cache_salt": ""}, "invalid_value", "cache_salt"),
    ({"cache_salt": "x" * 129}, "invalid_value", "cache_salt"),
    ({"cache_salt": 5}, "invalid_type", "cache_salt"),
    ({"echo": True}, "unknown_parameter", "echo"),
    ({"temprature": 1}, "unknown_parameter", "temprature"),
    (
        {"stream": True, "stream_options": {"include_usages": True}},
        "unknown_parameter",
        "stream_options.include_usages",
    ),
    ({"messages": [{"role": "user", "content": "word " * 3000}]}, "context_length_exceeded", "messages"),
    ({"messages": [{"role": "user", "content": " " * 16_000_000}]}, "context_length_exceeded", "messages"),
    ({"messages": [*FRANCE, {"role": "user", "content": "x", "weight": 1}]}, "unknown_parameter", "messages[1].weight"),
    ({"messages": [{"role": "user", "content": "x", "contents": "y"}]}, "unknown_parameter", "messages[0].contents"),
    (
        {"messages": [{"role": "user", "content": [{**TEXT, "lang": "en"}]}]},
        "unknown_parameter",
        "messages[0].content[0].lang",
    ),
    (
        {"messages": [*FRANCE, {"role": "assistant", "content": "x", "audio": {"id": "a"}}]},
        "unsupported_parameter",
        "messages[1].audio",
    ),
    *(
        ({"chat_template_kwargs": {name: "x"}}, "invalid_value", f"chat_template_kwargs.{name}")
        for name in ("messages", "tools", "bos_token", "eos_token", "add_generation_prompt", "raise_exception", "range")
    ),
]


@pytest.mark.parametrize(("change", "code", "param"), CHAT_REFUSALS)
def test_what_is_not_honoured_is_refused(server, change, code, param):
    response = server.post("/v1/chat/completions", **{"messages": FRANCE, **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert error["type"] == "invalid_request_error"
    assert param in error["message"] or code == "context_length_exceeded"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"suffix": "x"}, "unsupported_parameter", "suffix"),
        ({"logprobs": 21}, "invalid_value", "logprobs"),
        ({"messages": FRANCE}, "unknown_parameter", "messages"),
        ({"prompt": {"a": 1}}, "invalid_type", "prompt"),
        ({"prompt": []}, "empty_array", "prompt"),
        ({"prompt": [1, "x"]}, "invalid_value", "prompt"),
        ({"prompt": [10**8]}, "invalid_value", "prompt"),
        ({"top_k": "many"}, "invalid_type", "top_k"),
        ({"cache_salt": "x" * 129}, "invalid_value", "cache_salt"),
        ({"prompt": [[5]] * 2049}, "array_too_long", "prompt"),
        ({"response_format": "json"}, "invalid_type", "response_format"),
        ({"prompt": [5] * 1024}, "context_length_exceeded", "prompt"),
    ],
)
def test_what_completions_do_not_honour_is_refused(server, change, code, param):
    response = server.post("/v1/completions", **{"prompt": "x", **change})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"messages": [{"role": "robot"}]}, "invalid_type", "messages[0].role"),
        ({"prompt": "x", "texts": []}, "unknown_parameter", "texts"),
        ({"prompt": 1}, "invalid_type", "prompt"),
        ({}, "invalid_value", "prompt"),
        ({"prompt": "x", "continue_final_message": True}, "invalid_value", "continue_final_message"),
        ({"messages": [], "continue_final_message": True}, "empty_array", "messages"),
        ({"messages": [{"role": "user"}]}, "invalid_type", "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "unknown_parameter", "messages[0].weight"),
        ({"messages": FRANCE, "continue_final_message": True}, "invalid_value", "continue_final_message"),
    ],
)
def test_tokenize_names_the_field(server, body, code, param):
    error = server.http.post("/tokenize", json=body).json()["error"]
    assert (error["code"], error["param"]) == (code, param)


def test_an_unknown_parameter_gets_a_suggestion(server):
    response = server.post("/v1/chat/completions", messages=FRANCE, temprature=1)
    assert "Did you mean 'temperature'?" in response.json()["error"]["message"]


def test_wrong_bodies_paths_methods_and_models(server):
    post = server.http.post
    assert post("/v1/chat/completions", content=b"{oops").json()["error"]["code"] == "invalid_json"
    assert post("/v1/chat/completions", content=b"[1]").status_code == 400
    deep = b'{"chat_template_kwargs": ' + b'{"a":' * 600 + b"1" + b"}" * 601
    for odd in (b"[" * 100_000, b"\xff\xfe", deep):
        assert post("/v1/chat/completions", content=odd).json()["error"]["code"] == "invalid_json"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    other = post("/v1/chat/completions", json={"model": "gpt-5", "messages": FRANCE})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    assert server.http.get("/nothing").json()["error"]["code"] == "not_found"
    assert server.http.get("/v1/chat/completions").json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("half", ["\\ud83d", "\\ud83d and more", "\\ude00"])
def test_half_a_character_is_named(server, half):
    chat = f'{{"messages": [{{"role": "user", "content": "a {half}"}}]}}'
    completion = f'{{"prompt": "a {half}"}}'
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", completion), ("/tokenize", completion)):
        error = server.http.post(path, content=body.encode()).json()["error"]
        assert error["code"] == "invalid_json"
        assert "surrogate" in error["message"]


def test_a_prompt_that_can_never_fit_is_a_400_with_the_numbers_streaming_or_not(server):
    for stream in (False, True):
        response = server.post("/v1/completions", prompt=[5] * 1024, stream=stream)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "1024 tokens" in response.json()["error"]["message"]
    fits = server.complete([5] * 1020, max_tokens=100, ignore_eos=True)
    assert fits["usage"]["completion_tokens"] == 4, "the context ends here"
    assert fits["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("prompt", "n"), [(["x"] * 400, 1), ([[5]] * 2000, 64)])
def test_too_many_answers_are_refused_before_any_is_made(server, prompt, n):
    response = server.post("/v1/completions", prompt=prompt, n=n, max_tokens=1)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "too_many_answers", "prompt")
    assert f"{len(prompt) * n} answers" in error["message"]
    assert server.post("/v1/completions", prompt="x", n=128, max_tokens=1).status_code == 200


def test_fields_that_sdks_send_back_are_taken(server):
    """Of an answer's message, and of requests that others write: none of them changes the prompt of this model."""
    plain = [*FRANCE, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "Sure?"}]
    answer = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    thoughts = {"reasoning_content": "Paris, I think.", "reasoning": None}
    parts = [{"type": "text", "text": "Sure?", "cache_control": {"type": "ephemeral"}}]
    sent = [FRANCE[0] | {"name": "kim"}, plain[1] | answer | thoughts, {"role": "user", "content": parts}]
    counts = [server.post("/tokenize", messages=messages).json()["tokens"] for messages in (plain, sent)]
    assert counts[0] == counts[1]
    assert server.post("/v1/chat/completions", messages=sent, max_tokens=1).status_code == 200


@pytest.mark.parametrize("text", [" ", "\t", "a", "ab \n", "é", "<|im_end|>"])
def test_a_text_that_no_context_holds_is_refused_with_the_numbers_and_without_tokenizing(server, text):
    """At the door; up to there, whatever fits is counted."""
    context = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    most = context * 81  # the model's longest token: a line break and 80 spaces
    below, above = (text * (most // len(text) + 1))[:most], text * (most // len(text) + 1)
    for body in ({"prompt": above}, {"messages": [{"role": "user", "content": above}]}):
        error = server.post("/tokenize", **body).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))
        assert f"{len(above)} characters" in error["message"]
        assert f"{most} characters" in error["message"]
    assert server.post("/tokenize", prompt=below).json()["count"] >= context
