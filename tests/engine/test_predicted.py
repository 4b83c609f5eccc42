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


@pytest.mark.slow
def test_a_predicted_answer_is_accepted_and_counted(smollm2_path):
    server = Server(smollm2_path, "--speculative", "ngram", "--kv-cache-bytes", str(100 << 20)).wait_ready()

    def chat(**fields):
        messages = [{"role": "user", "content": "Name three colours of the rainbow."}]
        response = server.post("/v1/chat/completions", messages=messages, temperature=0, max_tokens=40, **fields)
        assert response.status_code == 200, response.text
        body = response.json()
        details = body["usage"].get("completion_tokens_details", {})
        return body["choices"][0]["message"]["content"], body["usage"], details.get("accepted_prediction_tokens", 0)

    try:
        text, _, looked_up = chat()
        again, usage, accepted = chat(prediction={"type": "content", "content": text})
        assert again == text
        assert looked_up < accepted <= usage["completion_tokens"]
        counted = f'tierline_engine_draft_tokens_total{{model="{MODEL}",outcome="accepted"}}'
        assert server.metric(counted) == looked_up + accepted
    finally:
        assert server.stop() == 0
