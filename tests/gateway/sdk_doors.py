"""A gateway for the official SDKs: one model behind a server of each dialect, and one for every misfortune."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.mock_agent import AgentWire
from bench.mock_anthropic import AnthropicWire
from bench.mock_upstream import MockUpstream
from gateway.tracing import Tracing
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door

CAPABILITIES = ["tools", "reasoning", "json_schema", "vision", "logprobs"]
# Models of both servers, by the fault that they have: the upstream's name of them asks for it.
FAULTS = {
    "cut": "cut,after=2,chunks=4",
    "slow": "answer,chunks=1000,interval_ms=20",
    "hanging": "hang",
    "failing": "status,status=500",
    "overloaded": "status,status=503",
    "limited": "status,status=429,retry_after=7",
    "refusing": "status,status=422",
    "failing-once": "status,status=500,times=1",
}
BOTH = ("agent", "claude")


class Doors:
    """The gateway (`door`) and the servers behind it, `agent` in the OpenAI dialect and `claude` in Anthropic's."""

    def __init__(self, door: FrontDoor, agent: MockUpstream, claude: MockUpstream) -> None:
        self.door = door
        self.agent = agent
        self.claude = claude

    def behind(self, model: str) -> MockUpstream:
        """The server of a model, whose name begins with the server's."""
        return self.claude if model.startswith("claude") else self.agent


@asynccontextmanager
async def doors(root: Path, *, tracing: Tracing | None = None) -> AsyncIterator[Doors]:
    """Models are named SERVER or SERVER-FAULT: `agent`, `claude-cut`, … The Anthropic server's key is in CLAUDE_KEY."""
    agent, claude = MockUpstream(AgentWire()), MockUpstream(AnthropicWire())
    await agent.start()
    await claude.start()
    models: dict[str, Any] = {}
    for server in BOTH:
        model = {"tier": "small", "backend": server, "capabilities": CAPABILITIES, "price": PRICE}
        models[server] = {**model, "max_output_tokens": 5000}
        for fault, upstream_model in FAULTS.items():
            models[f"{server}-{fault}"] = {**model, "upstream_model": upstream_model, "max_output_tokens": 5000}
    models["plain"] = {**models["agent"], "capabilities": []}
    models["vectors"] = {"kind": "embedding", "backend": "agent", "price": PRICE}
    document = configuration({"agent": agent, "claude": claude}, models)
    for backend in document["backends"].values():
        backend |= {"attempts": 1, "timeouts": {"connect_s": 20}}
    document["backends"]["claude"] |= {"dialect": "anthropic", "api_key_env": "CLAUDE_KEY"}
    document["server"]["max_body_bytes"] = 1 << 20
    try:
        async with front_door(root, document, policy=POLICY, tracing=tracing) as door:
            yield Doors(door, agent, claude)
    finally:
        await agent.stop()
        await claude.stop()


POLICY = """\
version: 1
name: default
owner: tests
routes:
  - tier: small
cache: {mode: "off"}
"""
