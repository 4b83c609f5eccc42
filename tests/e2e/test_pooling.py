"""Bundled engines that embed and that score, behind the gateway: the official SDK, keys, the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import yaml

from tests.conftest import ROOT, Stack, start_stack, unused_port
from tests.engine.pooling_models import write_embedder, write_reranker


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("pooling")
    document = yaml.safe_load((ROOT / "tierline.yaml").read_text())
    document["engines"]["smollm2-135m"] |= {"autostart": False}
    for name, kind, write in (("vectors", "embedding", write_embedder), ("order", "rerank", write_reranker)):
        path = folder / name
        path.mkdir()
        write(path, "lasttoken") if write is write_embedder else write(path)
        engine = {"model": str(path), "port": unused_port(), "kv_cache_bytes": 4 << 20, "threads": 1}
        document["engines"][name] = engine
        document["backends"][name] = {"engine": name}
        document["models"][name] = {"backend": name, "kind": kind, "context_length": 1024}
    settings = {key: document[key] for key in ("engines", "backends", "models")} | {"cache": {"enabled": False}}
    stack = start_stack(folder / "stack", smollm2_path, settings=settings)
    yield stack
    assert stack.stop() == 0


def test_embeddings_of_a_bundled_engine(stack: Stack) -> None:
    client = openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key=stack.key, max_retries=0)
    answer = client.embeddings.create(model="vectors", input=["Rome", "Paris", "Rome"])
    first, second, third = (np.array(item.embedding) for item in answer.data)
    assert np.linalg.norm(first) == pytest.approx(1, abs=1e-5)
    assert np.allclose(first, third, atol=1e-5)
    assert not np.allclose(first, second, atol=1e-2)
    assert answer.usage.total_tokens == 13
    with pytest.raises(openai.BadRequestError, match="'dimensions' must be 1 to 64"):
        client.embeddings.create(model="vectors", input="Rome", dimensions=65)
    ids = client.embeddings.create(model="vectors", input=[[1, 2, 3]])
    assert ids.usage.prompt_tokens == 3


def test_reranking_by_a_bundled_engine(stack: Stack) -> None:
    body = {"model": "order", "query": "Rome", "documents": ["a river", {"text": "a tower"}], "top_n": 1}
    headers = {"authorization": f"Bearer {stack.key}"}
    response = httpx.post(f"{stack.base_url}/v1/rerank", json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    (best,) = response.json()["results"]
    assert 0 < best["relevance_score"] < 1
    assert response.json()["usage"]["total_tokens"] == 2 * 4 + 7 + 7
