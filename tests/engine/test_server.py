"""The real server process with the real small model: what a client sees over HTTP."""

import asyncio
import re
import socket
import subprocess
import sys

import httpx
import openai
import psutil
import pytest

MODEL = "smollm2-135m"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


class Server:
    """`python -m engine` on a free port."""

    def __init__(self, path, *options):
        command = [sys.executable, "-m", "engine", "--model", str(path), "--served-name", MODEL, "--port", "0"]
        command += ["--threads", "1", "--precision", "float32", "--max-model-len", "1024", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        match = re.search(r"http://\S+", line)
        assert match, f"the server did not start: {line!r}, exit code {self.process.poll()}"
        self.url = match[0]
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def wait_ready(self):
        # Each probe waits in the server's own event loop for at most its time-out, so this does not spin.
        for _ in range(600):
            if self.http.get("/health").status_code == 200:
                return self
            try:
                self.process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"the server ended with {self.process.returncode}")
        raise AssertionError("the model was not loaded in two minutes")

    def post(self, path, **body):
        return self.http.post(path, json={"model": MODEL, **body})

    def complete(self, prompt, **body):
        response = self.post("/v1/completions", prompt=prompt, temperature=0, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name):
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(name.rstrip("}")):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name}")

    def pages(self, state):
        return self.metric(f'tierline_engine_pages{{model="{MODEL}",state="{state}"}}')

    def settle(self):
        """Wait for two health echoes: everything sent before has gone through the loop and its numbers are here."""
        for _ in range(2):
            assert self.http.get("/health").status_code == 200

    def wait_idle(self):
        for _ in range(2000):
            self.settle()
            if self.metric("tierline_engine_running") + self.metric("tierline_engine_waiting") == 0:
                return
        raise AssertionError("the engine does not become idle")

    def stop(self):
        self.http.close()
        self.process.terminate()
        code = self.process.wait(30)
        self.process.stdout.close()
        return code


@pytest.fixture(scope="module")
def server(smollm2_path):
    server = Server(smollm2_path, "--max-num-seqs", "64", "--kv-cache-bytes", str(400 << 20)).wait_ready()
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


# --- answers -----------------------------------------------------------------------------------------------------


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
    health = server.http.get("/health").json()
    assert health["status"] == "ok"
    assert health["last_step_age_seconds"] is None or health["last_step_age_seconds"] >= 0


# --- refusals ----------------------------------------------------------------------------------------------------

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


# --- clients that leave ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_leaves_frees_its_pages(server, stream, n):
    server.wait_idle()
    before = server.metric("tierline_engine_aborts_total")
    body = {"model": MODEL, "prompt": "Tell", "max_tokens": 900, "stream": stream, "ignore_eos": True, "n": n}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        task = asyncio.create_task(first_event(http, body))
        while server.metric("tierline_engine_running") < n:
            await asyncio.sleep(0)
            server.settle()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    server.wait_idle()
    assert server.metric("tierline_engine_aborts_total") - before == n
    assert server.pages("used") == 0
    assert server.pages("free") + server.pages("cached") == server.pages("total")


async def first_event(http, body):
    """Read until cancelled."""
    if not body["stream"]:
        await http.post("/v1/completions", json=body)
        return
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            pass


async def test_64_streams_of_which_16_leave_return_all_pages(server):
    server.wait_idle()
    aborts = server.metric("tierline_engine_aborts_total")

    async def stream(http, number):
        body = {"model": MODEL, "prompt": [number + 500] * 20, "max_tokens": 12, "stream": True, "ignore_eos": True}
        body["temperature"] = 0
        if number % 4 == 0:
            body["max_tokens"] = 900  # long enough to be left in mid-answer
        events = []
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line:
                    events.append(line)
                if number % 4 == 0 and len(events) == 3:
                    return events
        return events

    limits = httpx.Limits(max_connections=80)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as http:
        streams = await asyncio.gather(*(stream(http, number) for number in range(64)))
    for number, events in enumerate(streams):
        if number % 4:
            assert events[-1] == "data: [DONE]"
            assert len(events) == 14
    server.wait_idle()
    assert server.metric("tierline_engine_aborts_total") - aborts == 16
    assert server.pages("used") == 0
    assert server.pages("free") + server.pages("cached") == server.pages("total")


# --- the process -------------------------------------------------------------------------------------------------


def test_the_http_process_has_no_torch_and_one_core(server):
    process = psutil.Process(server.process.pid)
    assert not any("libtorch" in mapping.path for mapping in process.memory_maps())
    assert len(process.children(recursive=True)) == 1


def test_a_full_queue_is_429_with_retry_after_and_a_killed_core_is_503(smollm2_path):
    options = ("--max-num-seqs", "1", "--max-waiting", "0", "--kv-cache-bytes", str(100 << 20))
    server = Server(smollm2_path, *options)
    try:
        starting = server.post("/v1/completions", prompt="x")
        assert (starting.status_code, starting.json()["error"]["code"]) == (503, "engine_unavailable")
        assert starting.headers["retry-after"]
        server.wait_ready()
        body = {"model": MODEL, "prompt": "Tell", "max_tokens": 900, "stream": True, "ignore_eos": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            busy = server.post("/v1/completions", prompt="x")
            assert (busy.status_code, busy.json()["error"]["code"]) == (429, "queue_full")
            assert int(busy.headers["retry-after"]) >= 1
            [core] = psutil.Process(server.process.pid).children()
            core.kill()
            events = [line for line in lines if line]
        assert '"engine_unavailable"' in events[-1], "an error event, and no clean end"
        assert server.http.get("/health").status_code == 503
        server.wait_ready()
        assert server.complete("Hello", max_tokens=2)["usage"]["completion_tokens"] == 2
        assert server.metric("tierline_engine_core_restarts_total") == 1
    finally:
        assert server.stop() == 0


def run_engine(*arguments):
    command = [sys.executable, "-m", "engine", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_wrong_arguments_and_models_end_with_a_message(tmp_path, smollm2_path):
    assert run_engine("--model", "x", "--port", "-1").returncode == 2
    missing = run_engine("--model", "no-such-model", "--data-dir", str(tmp_path))
    assert missing.returncode == 1
    assert "tierline models pull no-such-model" in missing.stderr
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    broken = run_engine("--model", str(tmp_path / "bad.gguf"), "--port", "0")
    assert broken.returncode == 1
    assert "bad.gguf" in broken.stderr
    bounds = run_engine("--model", str(smollm2_path), "--max-num-seqs", "64", "--max-num-batched-tokens", "8")
    assert bounds.returncode == 1
    assert "max_num_batched_tokens (8) must be at least max_num_seqs (64)" in bounds.stderr
    # Only the core can find this out; the server reports it and ends.
    small = run_engine("--model", str(smollm2_path), "--port", "0", "--kv-cache-bytes", "1000")
    assert small.returncode == 1
    assert "could not be loaded" in small.stderr
