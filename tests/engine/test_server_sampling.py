"""Scored prompts, chosen answers, banned words and beams over HTTP, with the real model."""

import json
from pathlib import Path

import pytest

from tests.engine.serving import FRANCE, MODEL

PROMPT = "The capital of France is"


def events(response):
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("prompt", [PROMPT, "Ünïcode: 我们 🎉 <|im_end|> x", [504, 3575, 282, 4649, 314]], ids=str)
def test_echo_with_logprobs_covers_the_prompt(server, prompt):
    answer = server.complete(prompt, max_tokens=3, echo=True, logprobs=2, ignore_eos=True)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == answer["usage"]["prompt_tokens"] + 3
    assert {len(part) for part in logprobs.values()} == {len(logprobs["tokens"])}
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert "\ufffd" in token or choice["text"][offset:].startswith(token)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    # The prompt's own log-probabilities are those of an answer that says the same.
    if prompt == PROMPT:
        greedy = server.complete(PROMPT[:15], max_tokens=2, echo=True, logprobs=0, ignore_eos=True)["choices"][0]
        again = server.complete(greedy["text"], max_tokens=1, echo=True, logprobs=0)["choices"][0]["logprobs"]
        both = zip(greedy["logprobs"]["token_logprobs"][1:], again["token_logprobs"][1:], strict=False)
        assert all(one == pytest.approx(other, abs=1e-3) for one, other in both)


def test_a_prompt_alone_is_scored(server):
    want = server.complete(PROMPT, max_tokens=1, echo=True, logprobs=1)["choices"][0]["logprobs"]
    for fields in ({}, {"n": 2}, {"n": 1, "best_of": 3}):
        answer = server.complete([PROMPT] * 2, max_tokens=0, echo=True, logprobs=1, **fields)
        assert answer["usage"]["completion_tokens"] == 0
        assert len(answer["choices"]) == 2 * fields.get("n", 1)
        for choice in answer["choices"]:
            assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
            assert choice["logprobs"]["tokens"] == want["tokens"][:-1]
            assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(want["token_logprobs"][1:-1], abs=1e-4)
    told = events(server.post("/v1/completions", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1, stream=True))
    assert "".join(choice["text"] for event in told for choice in event["choices"]) == PROMPT
    for wrong in ({"prompt": PROMPT}, {"prompt": PROMPT, "echo": True, "beam_width": 2}):
        error = server.post("/v1/completions", max_tokens=0, **wrong).json()["error"]
        assert error["param"] == "max_tokens"


def test_a_stream_echoes_with_the_same_logprobs(server):
    fields = {"prompt": PROMPT, "max_tokens": 3, "echo": True, "logprobs": 1, "ignore_eos": True, "n": 2, "seed": 1}
    whole = server.post("/v1/completions", **fields).json()["choices"]
    found = {0: ["", []], 1: ["", []]}
    for event in events(server.post("/v1/completions", stream=True, **fields)):
        for choice in event["choices"]:
            text, values = found[choice["index"]]
            found[choice["index"]] = [text + choice["text"], values + choice["logprobs"]["token_logprobs"]]
    for choice in whole:
        text, values = found[choice["index"]]
        assert text == choice["text"]
        assert values == [value and pytest.approx(value, abs=1e-4) for value in choice["logprobs"]["token_logprobs"]]


def test_prompt_logprobs_have_vllms_shape_and_do_not_mind_the_cache(server):
    plain = {"max_tokens": 2, "temperature": 0}
    server.post("/v1/completions", prompt=PROMPT * 20, **plain)
    scored = [
        server.post("/v1/completions", prompt=PROMPT * 20, prompt_logprobs=2, n=n, seed=5, **plain).json()
        for n in (1, 1, 3)
    ]
    for answer in scored:
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "it is computed, not looked up"
        for choice in answer["choices"]:
            first, *entries = choice["prompt_logprobs"]
            assert first is None
            assert len(entries) == answer["usage"]["prompt_tokens"] - 1
            for entry in entries:
                assert 2 <= len(entry) <= 3
                assert sorted(value["rank"] for value in entry.values())[:2] == [1, 2]
                ranked = sorted(entry.values(), key=lambda value: value["rank"])
                assert [v["logprob"] for v in ranked] == sorted((v["logprob"] for v in ranked), reverse=True)
                assert all(isinstance(value["decoded_token"], str) for value in entry.values())
    assert scored[0]["choices"][0]["prompt_logprobs"] == scored[1]["choices"][0]["prompt_logprobs"]
    chat = server.post("/v1/chat/completions", messages=FRANCE, prompt_logprobs=0, **plain).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])


def test_best_of_gives_the_likeliest(server):
    fields = {"prompt": [PROMPT, "One, two,"], "max_tokens": 6, "seed": 11, "temperature": 1.2}
    every = server.post("/v1/completions", n=4, logprobs=0, **fields).json()

    def mean(choice):
        values = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values)

    want = []
    for number in (0, 1):
        want += sorted(every["choices"][4 * number : 4 * number + 4], key=mean, reverse=True)[:2]
    best = server.post("/v1/completions", n=2, best_of=4, **fields).json()
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in want]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"], "all that were generated"
    assert best["usage"]["prompt_tokens"] == every["usage"]["prompt_tokens"]


def test_bad_words_do_not_come(server):
    answer = server.complete(PROMPT, max_tokens=12)["choices"][0]["text"]
    first, second = answer.split()[:2]
    without = server.complete(PROMPT, max_tokens=12, bad_words=[first])["choices"][0]["text"]
    assert first not in without.split()
    pair = server.complete(PROMPT, max_tokens=12, bad_words=[f"{first} {second}"])["choices"][0]["text"]
    assert pair.split()[0] == first, "only the words together are banned"
    assert f"{first} {second}" not in pair
    ids = server.complete(PROMPT, max_tokens=12, return_token_ids=True)["choices"][0]["token_ids"]
    banned = server.complete(PROMPT, max_tokens=12, return_token_ids=True, bad_words=[ids[:2]])["choices"][0]
    assert banned["token_ids"][:1] == ids[:1]
    assert banned["token_ids"][:2] != ids[:2]


def test_typical_p_keeps_to_a_few_tokens(server):
    """The tokens whose probability is nearest to the typical one are few, and the same with every seed."""
    fields = {"prompt": "Once upon a", "max_tokens": 1, "n": 8, "typical_p": 0.0001}
    texts = {
        choice["text"]
        for seed in (1, 100)
        for choice in server.post("/v1/completions", seed=seed, **fields).json()["choices"]
    }
    assert len(texts) == 1


def test_beam_search_answers_and_counts(server):
    fields = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    answer = server.post("/v1/completions", beam_width=4, n=3, **fields).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 3
    assert all(choice["finish_reason"] == "length" for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 4 * 8, "what all beams generated"
    same = server.post("/v1/completions", use_beam_search=True, n=4, temperature=0, **fields).json()
    assert [choice["text"] for choice in same["choices"]][:3] == texts
    (one,) = server.post("/v1/completions", beam_width=1, **fields).json()["choices"]
    assert one["text"] == server.complete(PROMPT, max_tokens=8, ignore_eos=True)["choices"][0]["text"]
    chat = server.post("/v1/chat/completions", messages=FRANCE, beam_width=2, max_tokens=20).json()
    assert "Paris" in chat["choices"][0]["message"]["content"]
    server.wait_idle()
    assert server.pages("used") == 0


@pytest.mark.slow
def test_beams_are_those_of_transformers(server, smollm2_path):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        Path(smollm2_path).parent, gguf_file=Path(smollm2_path).name, dtype=torch.float32
    )
    for prompt in (PROMPT, "def fibonacci(n):\n", "Ingredients: flour,"):
        fields = {"max_tokens": 24, "beam_width": 4, "n": 4, "length_penalty": 0.7, "early_stopping": "never"}
        answer = server.post("/v1/completions", prompt=prompt, return_token_ids=True, **fields).json()
        ids = answer["choices"][0]["prompt_token_ids"]
        want = model.generate(
            torch.tensor([ids]),
            num_beams=4,
            num_return_sequences=4,
            length_penalty=0.7,
            early_stopping="never",
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=[0, 2],
            pad_token_id=0,
        )
        for choice, sequence in zip(answer["choices"], want, strict=True):
            tokens = choice["token_ids"]
            assert sequence[len(ids) : len(ids) + len(tokens)].tolist() == tokens


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"typical_p": 1.5}, "typical_p"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"bad_words": ["  "]}, "bad_words[0]"),
        ({"bad_words": ["x", []]}, "bad_words[1]"),
        ({"bad_words": [[10**7]]}, "bad_words[0]"),
        ({"bad_words": ["x"] * 1001}, "bad_words"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 1000}, "best_of"),
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 65}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True, "use_beam_search": False}, "early_stopping"),
        ({"beam_width": 2, "early_stopping": "always"}, "early_stopping"),
        ({"beam_width": 2, "length_penalty": 11}, "length_penalty"),
        ({"beam_width": 2, "stream": True}, "stream"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature"),
        ({"beam_width": 2, "top_p": 0.9}, "top_p"),
        ({"beam_width": 2, "seed": 1}, "seed"),
        ({"beam_width": 2, "stop": "x"}, "stop"),
        ({"beam_width": 2, "logprobs": 0}, "logprobs"),
        ({"beam_width": 2, "best_of": 2}, "best_of"),
        ({"beam_width": 2, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"beam_width": 2, "bad_words": ["x"]}, "bad_words"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(server, change, param):
    response = server.post("/v1/completions", prompt="x", **change)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert param in error["message"]


def test_more_beams_than_rows_or_pages_are_refused(server):
    """The engine of these tests runs 64 rows; its pages hold some 1,100 tokens for each of four beams or fewer."""
    limit = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    response = server.post("/v1/completions", prompt=[504] * (limit - 1), beam_width=64)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "tokens for each of 64 beams" in response.json()["error"]["message"]
    assert MODEL
