"""One bundled engine with two adapters behind the gateway: three models, one process, one batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml

from tests.conftest import ROOT, Stack, start_stack, unused_port
from tests.engine.adapters import write_adapter
from tests.engine.models import write_model

PROMPT = [17, 93, 45, 201, 88, 139]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, Any]:
    """transformers' model and PEFT's, by the names that the gateway has for them."""
    base = write_model(folder / "tiny.gguf")
    legal = write_adapter(folder / "loras" / "legal", base, seed=1)
    return {"tiny": base, "legal": legal, "polite": write_adapter(folder / "loras" / "polite", base, seed=2)}


@pytest.fixture(scope="module")
def stack(folder: Path, references: dict[str, Any], smollm2_path: Path) -> Iterator[Stack]:
    document = yaml.safe_load((ROOT / "tierline.yaml").read_text())
    document["engines"]["smollm2-135m"] |= {"autostart": False}
    engine = {"model": str(folder / "tiny.gguf"), "port": unused_port(), "kv_cache_bytes": 4 << 20, "threads": 1}
    engine |= {"precision": "float32", "lora": {"legal-v2": str(folder / "loras" / "legal")}}
    engine["lora"]["polite"] = str(folder / "loras" / "polite")
    document["engines"]["tuned"] = engine
    document["backends"]["tuned"] = {"engine": "tuned"}
    for name, upstream in (("tiny", None), ("legal", "legal-v2"), ("polite", None)):
        document["models"][name] = {"tier": "small", "backend": "tuned", "context_length": 512}
        document["models"][name] |= {"upstream_model": upstream} if upstream else {}
    settings = {key: document[key] for key in ("engines", "backends", "models")} | {"cache": {"enabled": False}}
    stack = start_stack(folder / "stack", smollm2_path, settings=settings)
    yield stack
    assert stack.stop() == 0


@torch.inference_mode()
def greedy(model: Any, count: int = 8) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def test_each_model_of_the_gateway_is_answered_by_its_adapter(stack: Stack, references: dict[str, Any]) -> None:
    answers = {}
    for name, reference in references.items():
        body = {"model": name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        headers = {"authorization": f"Bearer {stack.key}"}
        response = httpx.post(f"{stack.base_url}/v1/completions", json=body, headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        assert response.headers["x-tierline-model"] == name
        answers[name] = response.json()["choices"][0]["token_ids"]
        assert answers[name] == greedy(reference)
    assert len({tuple(answer) for answer in answers.values()}) == 3
