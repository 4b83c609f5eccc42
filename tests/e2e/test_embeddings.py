"""The local embedder as a backend: the official SDK gets the vectors of the model, in the precision that is served."""

from __future__ import annotations

import numpy as np
import openai
import pytest

from tests.conftest import Stack

TEXTS = ["What is the capital of France?", "Wie heißt die Hauptstadt? 😀"]


@pytest.fixture(scope="module")
def sdk(tierline_stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tierline_stack.base_url}/v1", api_key=tierline_stack.key, max_retries=0)


def test_the_vectors_are_those_of_the_model(sdk: openai.OpenAI, minilm_path) -> None:
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(str(minilm_path), device="cpu").encode(TEXTS, normalize_embeddings=True)
    packed = sdk.embeddings.create(model="all-minilm-l6-v2", input=TEXTS)  # the SDK asks for base64 by itself
    plain = sdk.embeddings.create(model="auto", input=TEXTS, encoding_format="float")
    for answer in (packed, plain):
        vectors = np.array([item.embedding for item in answer.data])
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
        assert (np.einsum("ij,ij->i", vectors, expected) > 0.99).all()  # the bundled model is served in int8
        assert answer.usage.prompt_tokens > 10
        assert answer.model == "all-minilm-l6-v2"


def test_a_text_beyond_the_window_is_refused_and_not_cut(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="window"):
        sdk.embeddings.create(model="all-minilm-l6-v2", input="word " * 400)
