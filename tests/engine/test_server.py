"""The real server process with the real small model: what a client gets for each parameter."""

import openai
import pytest

from tests.engine.serving import FRANCE, MODEL


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_conversation_through_the_openai_sdk(client):
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=30)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    turns = [*FRANCE, {"role": "assistant", "content": answer.choices[0].message.content}]
    turns.append({"role": "user", "content": "And of Germany?"})
    second = client.chat.completions.create(model=MODEL, messages=turns, temperature=0, max_tokens=30)
    assert "Berlin" in second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens >= 32


def test_streaming_gives_the_same_text_and_usage_as_a_whole_answer(client):
    options = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 20}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_events_are_written_one_by_one_and_end_with_done(server):
    body = {"prompt": "One two three", "max_tokens": 5, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json={"model": MODEL, **body}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-request-id"]
        events = [line for line in response.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    assert len(events) == 7  # five tokens, the finish reason, the end


def test_n_answers_share_the_prompt_and_differ(server):
    body = {"messages": FRANCE, "n": 3, "seed": 7, "temperature": 1.5, "max_tokens": 8}
    first, again = (server.post("/v1/chat/completions", **body).json() for _ in range(2))
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice["message"]["content"] for choice in again["choices"]], "the seed repeats it"
    counts = first["usage"]
    single = server.post("/v1/chat/completions", messages=FRANCE, max_tokens=1).json()["usage"]
    assert counts["prompt_tokens"] == single["prompt_tokens"]
    streamed = ["", "", ""]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for chunk in client.chat.completions.create(model=MODEL, stream=True, **body):
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_prompts_as_text_texts_ids_and_lists_of_ids(server):
    text = "The quick brown fox"
    ids = server.post("/tokenize", prompt=text).json()["tokens"]
    one = server.complete(text, max_tokens=5)["choices"][0]["text"]
    assert server.complete(ids, max_tokens=5)["choices"][0]["text"] == one
    several = server.complete([text, "Two plus two is", text], max_tokens=5)
    assert [choice["text"] for choice in several["choices"]][::2] == [one, one]
    assert several["usage"]["prompt_tokens"] >= 3 * len(ids) - 2
    nested = server.complete([ids, ids[:2]], max_tokens=5, n=1)
    assert nested["choices"][0]["text"] == one
    for prompt in ([], [1, "a"], "", [[]], [10**9]):
        assert server.post("/v1/completions", prompt=prompt).status_code == 400


def test_echo_and_completion_logprobs(server):
    text = "The quick brown"
    answer = server.complete(text, max_tokens=3, echo=True, ignore_eos=True)
    assert answer["choices"][0]["text"].startswith(text)
    answer = server.complete(text, max_tokens=3, logprobs=2, ignore_eos=True)["choices"][0]
    logprobs = answer["logprobs"]
    assert "".join(logprobs["tokens"]) == answer["text"]
    assert [max(top.values()) for top in logprobs["top_logprobs"]] == logprobs["token_logprobs"], "greedy"
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert answer["text"][offset:].startswith(token)


def test_chat_logprobs_have_openais_shape(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=30, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    data = b"".join(bytes(entry.bytes) for entry in content)
    assert data.decode().startswith(answer.choices[0].message.content), "the end token follows"
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob <= 0
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )


def test_stop_strings_cut_the_text_and_the_engine(server):
    full = server.complete("1, 2, 3, 4, 5,", max_tokens=15, ignore_eos=True)["choices"][0]["text"]
    stop = full[8:11]
    cut = server.complete("1, 2, 3, 4, 5,", max_tokens=15, ignore_eos=True, stop=["never seen", stop])
    choice = cut["choices"][0]
    assert choice["text"] == full[: full.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert cut["usage"]["completion_tokens"] < 15
    kept = server.complete("1, 2, 3, 4, 5,", max_tokens=15, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == choice["text"] + stop


def test_token_limits_end_tokens_and_token_ids(server):
    body = {"messages": FRANCE, "temperature": 0, "return_token_ids": True}
    answer = server.post("/v1/chat/completions", **body, max_completion_tokens=4).json()
    choice = answer["choices"][0]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 4)
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    stop = choice["token_ids"][2]
    answer = server.post("/v1/chat/completions", **body, max_tokens=4, stop_token_ids=[stop]).json()
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"][-1] == stop
    # Without a limit the model's own end token ends it, and with `min_tokens` or `ignore_eos` it does not.
    natural = server.post("/v1/chat/completions", **body).json()["usage"]["completion_tokens"]
    for option in ({"min_tokens": natural + 4}, {"ignore_eos": True}):
        longer = server.post("/v1/chat/completions", **body, **option, max_tokens=natural + 5).json()
        assert longer["usage"]["completion_tokens"] > natural


def test_sampling_parameters_reach_the_sampler(server):
    prompt = "The weather today is"
    greedy = server.complete(prompt, max_tokens=4, return_token_ids=True, ignore_eos=True)["choices"][0]
    first = greedy["token_ids"][0]

    def sampled(**options):
        response = server.post("/v1/completions", prompt=prompt, max_tokens=4, ignore_eos=True, seed=3, **options)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    assert sampled(temperature=1.8) != greedy["text"]
    for narrowing in ({"top_k": 1}, {"top_p": 1e-6}, {"top_p": 0}, {"min_p": 1.0}, {"temperature": 0}):
        assert sampled(**{"temperature": 1.8, **narrowing}) == greedy["text"], narrowing
    assert sampled(temperature=1.8, top_k=-1) == sampled(temperature=1.8)
    banned = server.complete(prompt, max_tokens=1, logit_bias={str(first): -100}, return_token_ids=True)
    assert banned["choices"][0]["token_ids"][0] != first
    long = server.complete("a a a a a a a a", max_tokens=8, ignore_eos=True)["choices"][0]["text"]
    for penalty in ({"repetition_penalty": 5.0}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        other = server.complete("a a a a a a a a", max_tokens=8, ignore_eos=True, **penalty)["choices"][0]["text"]
        assert other != long, penalty


def test_the_prefix_cache_counts_and_salts_separate(server):
    ids = list(range(1000, 1100))

    def cached(**options):
        answer = server.complete(ids, max_tokens=2, **options)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["text"]

    cold, text = cached(cache_salt="tenant a")
    warm, same_text = cached(cache_salt="tenant a")
    other, _ = cached(cache_salt="tenant b")
    assert (cold, warm, other) == (0, 96, 0)
    assert same_text == text


def test_continue_final_message_goes_on_in_the_same_turn(server):
    messages = [*FRANCE, {"role": "assistant", "content": "The capital of France is"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 3, "return_token_ids": True}
    answer = server.post("/v1/chat/completions", **body, continue_final_message=True).json()
    assert answer["choices"][0]["message"]["content"].strip().startswith("Paris")
    prompt = server.post("/detokenize", tokens=answer["prompt_token_ids"]).json()["prompt"]
    assert prompt.endswith("The capital of France is")
    counted = server.post("/tokenize", messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert counted.json()["tokens"] == answer["prompt_token_ids"]
    refused = server.post("/v1/chat/completions", **body, continue_final_message=True, add_generation_prompt=True)
    assert refused.status_code == 400
    assert server.post("/v1/chat/completions", messages=FRANCE, continue_final_message=True).status_code == 400


def test_unusual_messages(server):
    parts = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}]
    for message in ({"role": "user", "content": parts}, {"role": "user", "content": "中文 😀 \n\n"}):
        developer = {"role": "developer", "content": "Be brief."}
        answer = server.post("/v1/chat/completions", messages=[developer, message], max_tokens=2)
        assert answer.status_code == 200, answer.text


def test_tokenize_and_detokenize_round_trip(server):
    text = "Hello <|im_end|> 中文 😀"
    answer = server.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 1024
    assert server.post("/detokenize", tokens=answer["tokens"]).json()["prompt"] == text
    chat = server.post("/tokenize", messages=FRANCE).json()
    usage = server.post("/v1/chat/completions", messages=FRANCE, max_tokens=1).json()["usage"]
    assert chat["count"] == usage["prompt_tokens"]
    assert server.post("/tokenize").status_code == 400
    assert server.post("/detokenize", tokens=[-1]).status_code == 400


def test_models_and_health(server):
    card = server.http.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == (MODEL, 1024)
    assert server.http.get(f"/v1/models/{MODEL}").json() == card
    missing = server.http.get("/v1/models/somebody/else")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    health = server.http.get("/health").json()
    assert health["status"] == "ok"
    assert health["last_step_age_seconds"] is None or health["last_step_age_seconds"] >= 0


def test_a_prompt_that_is_computed_for_another_engine_has_a_deadline_too(server):
    late = server.post("/v1/prefill/completions", prompt=[5] * 900, deadline_ms=1)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    asked = {"model": MODEL, "messages": FRANCE}
    late = server.http.post("/v1/prefill/chat/completions", json=asked, headers={"x-tierline-deadline-ms": "1"})
    assert late.status_code == 504
    fine = server.post("/v1/prefill/completions", prompt=[5] * 32, deadline_ms=60_000).json()
    assert fine["usage"]["prompt_tokens"] == 32
