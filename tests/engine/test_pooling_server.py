"""Embeddings, reranking and scores over HTTP, by tiny models; the numbers are those of transformers."""

import asyncio
import base64
import json

import httpx
import numpy as np
import openai
import pytest
import tokenizers
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from engine.pipelines.pairs import PairForm
from tests.engine.models import write_model
from tests.engine.pooling_models import reference_vector, write_embedder, write_reranker
from tests.engine.serving import MODEL, Server

POOLING = ("--kv-cache-bytes", str(2 << 20), "--max-num-seqs", "4", "--max-waiting", "4")
PAIR_TEMPLATE = (
    "{{ messages|selectattr('role', 'eq', 'system')|map(attribute='content')|join }}#"
    "{{ messages|selectattr('role', 'eq', 'query')|map(attribute='content')|join }}|"
    "{{ messages|selectattr('role', 'eq', 'document')|map(attribute='content')|join }}="
)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    path = tmp_path_factory.mktemp("embedder")
    model = write_embedder(path, "mean_tokens")
    server = Server(path, *POOLING).wait_ready()
    yield server, model, tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    assert server.stop() == 0


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    path = tmp_path_factory.mktemp("reranker")
    model = write_reranker(path)
    server = Server(path, *POOLING).wait_ready()
    yield server, model, tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    assert server.stop() == 0


def unit(vector):
    return vector / np.linalg.norm(vector)


def refused(response):
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


# --- embeddings --------------------------------------------------------------------------------------------------


def test_embeddings_by_the_official_sdk_in_every_form_of_input(embedder):
    server, model, tokenizer = embedder
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    texts = ["Rome", "the river Tiber 🌊"]
    ids = [tokenizer.encode(text).ids for text in texts]
    expected = [unit(reference_vector(model, one, "mean_tokens")) for one in ids]
    for given, count in ((texts, 2), (ids, 2), (texts[0], 1), (ids[0], 1)):
        answer = client.embeddings.create(model=MODEL, input=given)  # the SDK asks for base64 by itself
        assert [item.index for item in answer.data] == list(range(count))
        for item, vector in zip(answer.data, expected, strict=False):
            assert np.allclose(item.embedding, vector, atol=2e-5)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids[:count]))
    floats = client.embeddings.create(model=MODEL, input=texts[0], encoding_format="float")
    assert np.allclose(floats.data[0].embedding, expected[0], atol=2e-5)


def test_fewer_dimensions_are_the_first_ones_brought_to_length_one(embedder):
    server, model, tokenizer = embedder
    body = {"input": "Rome", "dimensions": 8, "encoding_format": "base64"}
    answer = server.post("/v1/embeddings", **body).json()
    vector = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), dtype="<f4")
    expected = reference_vector(model, tokenizer.encode("Rome").ids, "mean_tokens")[:8]
    assert np.allclose(vector, unit(expected), atol=2e-5)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"input": []}, "empty_array", "input"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": ["a", [1]]}, "invalid_value", "input"),
        ({"input": [999]}, "invalid_value", "input"),
        ({"input": "a", "dimensions": 65}, "invalid_value", "dimensions"),
        ({"input": "a", "dimensions": 0}, "invalid_value", "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "invalid_value", "encoding_format"),
        ({"input": "a", "truncate": True}, "unknown_parameter", "truncate"),
        ({"input": "a", "cache_salt": ""}, "invalid_value", "cache_salt"),
        ({"input": ["a"] * 2049}, "array_too_long", "input"),
        ({"input": "a", "priority": 101}, "invalid_value", "priority"),
        ({"input": "a", "deadline_ms": 0}, "invalid_value", "deadline_ms"),
        ({"input": "a", "tenant": ""}, "invalid_value", "tenant"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_field(embedder, body, code, param):
    assert refused(embedder[0].post("/v1/embeddings", **body)) == (400, code, param)


def test_a_text_that_is_too_long_is_refused_with_the_numbers(embedder):
    response = embedder[0].post("/v1/embeddings", input=[[1], [1] * 1025])
    assert refused(response) == (400, "context_length_exceeded", "input")
    assert "Text 1 of 'input' has 1025 tokens; this engine holds 1024." in response.json()["error"]["message"]
    assert embedder[0].post("/v1/embeddings", input=[1] * 1024).status_code == 200, "as long as the context is fine"


async def test_more_texts_than_the_queue_holds_and_many_requests_are_served_in_turn(embedder):
    server, model, tokenizer = embedder
    many = [f"text number {i}" for i in range(100)]
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:

        async def embed(texts):
            answer = (await http.post("/v1/embeddings", json={"model": MODEL, "input": texts})).json()
            return [np.array(item["embedding"]) for item in answer["data"]]

        large, *small = await asyncio.gather(embed(many), *(embed([f"small {i}"]) for i in range(5)))
    for text, vector in zip(many[::25], large[::25], strict=True):
        assert np.allclose(vector, unit(reference_vector(model, tokenizer.encode(text).ids, "mean_tokens")), atol=2e-5)
    assert all(len(vectors) == 1 for vectors in small)
    steps = server.metric("tierline_engine_step_seconds_count")
    assert steps < 100, "several texts share a step"
    assert server.pages("used") == 0


async def test_a_client_that_leaves_gives_up_all_its_texts(embedder):
    server, _, _ = embedder
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        task = asyncio.create_task(http.post("/v1/embeddings", json={"model": MODEL, "input": ["x" * 900] * 2000}))
        while server.metric("tierline_engine_running") == 0:
            await asyncio.sleep(0)
            server.settle()
            assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    server.wait_idle()
    assert server.metric('tierline_engine_requests_total{finish_reason="stop",model="smollm2-135m"}') < 2000
    assert server.pages("used") == 0
    assert server.post("/v1/embeddings", input="a").status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/rerank", "/v1/score"])
def test_an_embedder_says_what_it_is_for(embedder, path):
    response = embedder[0].post(path, prompt="x", messages=[], query="x", documents=["y"])
    assert (response.status_code, response.json()["error"]["code"]) == (400, "wrong_task")
    assert "use /v1/embeddings" in response.json()["error"]["message"]
    assert embedder[0].http.get("/v1/models").json()["data"][0]["task"] == "embed"


def test_a_model_that_generates_refuses_what_it_is_not_for(server):
    response = server.post("/v1/embeddings", input="x")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "wrong_task")
    assert "use /v1/chat/completions" in response.json()["error"]["message"]


# --- scores ------------------------------------------------------------------------------------------------------


def reference_score(model, ids):
    with torch.no_grad():
        return torch.sigmoid(model(torch.tensor([ids])).logits[0, 0]).item()


def test_documents_are_put_in_the_order_of_their_scores(reranker):
    server, model, tokenizer = reranker
    documents = ["a river", "a tower", {"text": "the capital of Italy"}, "a tower"]
    texts = [document if isinstance(document, str) else document["text"] for document in documents]
    ids = [tokenizer.encode("Rome").ids + tokenizer.encode(text).ids for text in texts]
    expected = [reference_score(model, one) for one in ids]
    for path in ("/v1/rerank", "/rerank"):
        answer = server.post(path, query="Rome", documents=documents, return_documents=True).json()
        results = answer["results"]
        assert [r["index"] for r in results] == sorted(range(4), key=lambda i: (-round(expected[i], 5), i))
        for result in results:
            assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=2e-5)
            assert result["document"] == {"text": texts[result["index"]]}
        assert answer["usage"]["total_tokens"] == sum(map(len, ids))
    best = server.post("/v1/rerank", query="Rome", documents=documents, top_n=1).json()["results"]
    assert len(best) == 1
    assert "document" not in best[0]


def test_scores_of_pairs(reranker):
    server, model, tokenizer = reranker

    def expected(first, second):
        return pytest.approx(
            reference_score(model, tokenizer.encode(first).ids + tokenizer.encode(second).ids), abs=2e-5
        )

    one = server.post("/v1/score", text_1="a", text_2=["b", "c"]).json()["data"]
    assert [item["score"] for item in one] == [expected("a", "b"), expected("a", "c")]
    each = server.post("/score", text_1=["a", "b"], text_2=["c", "d"]).json()["data"]
    assert [item["score"] for item in each] == [expected("a", "c"), expected("b", "d")]


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}, "empty_array", "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{}]}, "invalid_value", "documents[0]"),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"text": 5}]}, "invalid_value", "documents[1]"),
        (
            "/v1/rerank",
            {"query": "a", "documents": [{"text": "b", "title": "c"}]},
            "unknown_parameter",
            "documents[0].title",
        ),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "array_too_long", "documents"),
        ("/v1/rerank", {"query": "a" * 600, "documents": ["b"] * 2000}, "array_too_long", "documents"),
        ("/v1/score", {"text_1": ["a"] * 2049, "text_2": ["b"] * 2049}, "array_too_long", "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "deadline_ms": -1}, "invalid_value", "deadline_ms"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "invalid_value", "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top": 1}, "unknown_parameter", "top"),
        ("/v1/rerank", {"query": "a", "documents": ["b" * 1024]}, "context_length_exceeded", "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "unsupported_parameter", "instruction"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "invalid_value", "text_1"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_field(reranker, path, body, code, param):
    assert refused(reranker[0].post(path, **body)) == (400, code, param)


def test_who_runs_when_is_said_as_for_answers(embedder, reranker):
    """What cannot come in time is not computed; the header counts as the body does, and the sooner of the two."""
    long = [[5] * 1024] * 64
    before = embedder[0].metric('tierline_engine_requests_total{finish_reason="deadline"')
    soon = {"x-tierline-deadline-ms": "1"}
    for body, headers in (({"deadline_ms": 1}, {}), ({}, soon), ({"deadline_ms": 86_400_000}, soon)):
        late = embedder[0].http.post("/v1/embeddings", json={"model": MODEL, "input": long, **body}, headers=headers)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert embedder[0].metric('tierline_engine_requests_total{finish_reason="deadline"') > before
    fine = {"priority": -5, "tenant": "t", "deadline_ms": 60_000}
    assert embedder[0].post("/v1/embeddings", input="a", **fine).status_code == 200
    assert reranker[0].post("/v1/rerank", query="a", documents=["b"], **fine).status_code == 200
    assert reranker[0].post("/v1/score", text_1="a", text_2="b", **fine).status_code == 200
    wrong = reranker[0].http.post("/v1/score", json={"model": MODEL}, headers={"x-tierline-deadline-ms": "soon"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid_value")
    embedder[0].wait_idle()
    assert embedder[0].pages("used") == 0


def test_a_template_for_pairs_is_used_where_the_model_brings_one(tmp_path):
    model = write_reranker(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(PAIR_TEMPLATE)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    server = Server(tmp_path, *POOLING).wait_ready()
    try:
        answer = server.post("/v1/rerank", query="a", documents=["b", "c"], instruction="i").json()
        for result in answer["results"]:
            ids = tokenizer.encode(f"i#a|{'bc'[result['index']]}=").ids
            with torch.no_grad():
                expected = model(torch.tensor([ids])).logits[0, 0].item()
            assert result["relevance_score"] == pytest.approx(expected, abs=1e-4), "and the score as it is"
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize("pair", ["$A $B", "<s> $A </s> $B </s>", "$B <s> $A"])
def test_pairs_are_written_as_the_tokenizer_says(pair):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "x": 2, "y": 3}, unk_token="x"))
    specials = [("<s>", 0), ("</s>", 1)]
    tokenizer.post_processor = TemplateProcessing(single="$A", pair=pair, special_tokens=specials)
    form = PairForm.of(tokenizer.to_str())
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert form.ids([2], [3]) == reference("x", "y")["input_ids"]


def test_a_pair_that_misses_a_text_is_refused():
    pair = [{"Sequence": {"id": "A", "type_id": 0}}] * 2
    definition = json.dumps({"post_processor": {"type": "TemplateProcessing", "pair": pair, "special_tokens": {}}})
    with pytest.raises(ValueError, match="writes pairs of texts as"):
        PairForm.of(definition)


def test_options_that_do_not_go_with_pooling_are_refused(tmp_path):
    write_model(tmp_path / "tiny.gguf", metadata={"llama.pooling_type": 3})
    for options in (("--speculative", "ngram"), ("--task", "score")):
        with pytest.raises(AssertionError, match="did not start"):
            Server(tmp_path / "tiny.gguf", *options)
