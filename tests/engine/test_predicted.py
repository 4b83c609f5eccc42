"""A chat's `prediction`, over HTTP: it saves steps and changes nothing."""

import pytest

from backends.protocol import InvalidRequest
from engine.server.predicted import predicted_text
from tests.engine.serving import MODEL, Server


def test_a_text_or_texts():
    assert predicted_text(None) == ""
    assert predicted_text({"type": "content", "content": "a b"}) == "a b"
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert predicted_text({"type": "content", "content": parts}) == "a b"


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "answer", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0]"),
    ],
)
def test_what_it_is_not(prediction, param):
    with pytest.raises(InvalidRequest) as refused:
        predicted_text(prediction)
    assert refused.value.param == param


@pytest.fixture(scope="module")
def speculating(smollm2_path):
    server = Server(smollm2_path, "--speculative", "ngram", "--kv-cache-bytes", str(100 << 20)).wait_ready()
    yield server
    assert server.stop() == 0


def chat(server, words, **fields):
    """The answer, its usage and how many drafts it took over."""
    messages = [{"role": "user", "content": words}]
    response = server.post("/v1/chat/completions", messages=messages, **{"temperature": 0, "max_tokens": 40} | fields)
    assert response.status_code == 200, response.text
    body = response.json()
    details = body["usage"].get("completion_tokens_details", {})
    return body["choices"][0]["message"]["content"], body["usage"], details.get("accepted_prediction_tokens", 0)


@pytest.mark.slow
def test_a_predicted_answer_is_accepted_and_counted(speculating):
    counted = f'tierline_engine_draft_tokens_total{{model="{MODEL}",outcome="accepted"}}'
    before = speculating.metric(counted)
    text, _, looked_up = chat(speculating, "Name three colours of the rainbow.")
    prediction = {"type": "content", "content": text}
    again, usage, accepted = chat(speculating, "Name three colours of the rainbow.", prediction=prediction)
    assert again == text
    assert looked_up < accepted <= usage["completion_tokens"]
    assert speculating.metric(counted) - before == looked_up + accepted


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "(ab ab |cd cd )+[.]"}},
        {"structured_outputs": {"json": {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 8}}},
        {"stop": ["blue", "e, "], "logprobs": True},
        {"frequency_penalty": 0.6, "repetition_penalty": 1.1, "min_tokens": 30},
        {"n": 3, "seed": 5, "temperature": 0.8},
    ],
    ids=str,
)
def test_answers_are_those_of_an_engine_without_speculation(server, speculating, fields):
    words = "Repeat: red, blue, red, blue, red, blue, red, blue, red, blue."
    plain, plain_usage, none = chat(server, words, **fields)
    text, usage, _ = chat(speculating, words, **fields)
    assert text == plain
    assert usage["completion_tokens"] == plain_usage["completion_tokens"]
    assert none == 0
