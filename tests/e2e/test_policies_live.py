"""A policy edited while the gateway runs: in force within two seconds, and a broken one never is."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

from tests.conftest import Stack


@pytest.fixture
def default_policy(tierline_stack: Stack) -> Iterator[str]:
    path = tierline_stack.policies_dir / "default.yaml"
    original = path.read_text()
    yield original
    path.write_text(original)
    time.sleep(0.2)


def decided(stack: Stack) -> str:
    """The policy version that decided a request just now."""
    body = {"model": "auto", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    response = httpx.post(
        f"{stack.base_url}/v1/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {stack.key}", "x-tierline-cache": "no-cache, no-store"},
        timeout=60,
    )
    assert response.status_code == 200
    return response.headers["x-tierline-policy"]


def ready(stack: Stack) -> dict[str, object]:
    policies: dict[str, object] = httpx.get(f"{stack.base_url}/health/ready").json()["policies"]
    return policies


def wait_until(true: object, timeout_s: float = 2.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, "the edit was not in force within two seconds"
        time.sleep(0.02)


def test_good_bad_good(tierline_stack: Stack, default_policy: str) -> None:
    path = tierline_stack.policies_dir / "default.yaml"
    first = decided(tierline_stack)

    path.write_text(default_policy + "\n# edited\ndescription: edited while running\n")
    wait_until(lambda: decided(tierline_stack) != first)
    second = decided(tierline_stack)

    path.write_text(default_policy.replace("routes:", "rouets:", 1))
    wait_until(lambda: ready(tierline_stack)["problems"] == 1)
    assert decided(tierline_stack) == second
    line = next(i for i, text in enumerate(default_policy.splitlines(), 1) if text.startswith("routes:"))
    log = (tierline_stack.data_dir / "log" / "gateway.log").read_text()
    assert f"default.yaml:{line}:" in log
    assert "Did you mean 'routes'?" in log
    terminal = tierline_stack.config.parent / "up.jsonl"
    wait_until(lambda: f"default.yaml:{line}:" in terminal.read_text())

    path.write_text(default_policy)
    wait_until(lambda: ready(tierline_stack)["problems"] == 0)
    assert decided(tierline_stack) == first
