"""A gateway with a model on each of three tiers, whose servers say what a test wrote down."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.mock_agent import AgentWire
from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import FrontDoor, configuration, front_door
from tests.gateway.script_wire import ScriptWire

TIERS = ("small", "medium", "large")
ABLE = ["tools", "json_schema", "logprobs"]


class Tiered:
    """The gateway (`door`), and by tier what its model says (`wires`) and its server (`servers`)."""

    def __init__(self, door: FrontDoor, servers: dict[str, MockUpstream], wires: dict[str, ScriptWire]) -> None:
        self.door = door
        self.servers = servers
        self.wires = wires

    def says(self, tier: str, text: str, **more: Any) -> None:
        """What a tier's model answers, whole and in a stream of two pieces."""
        wire = self.wires[tier]
        wire.message = {"role": "assistant", "content": text}
        half = len(text) // 2
        wire.deltas = [{"content": piece} for piece in (text[:half], text[half:]) if piece]
        wire.finish_reason = "stop"
        for name, value in more.items():
            setattr(wire, name, value)

    def asked(self) -> dict[str, int]:
        """How many requests each tier's server has got."""
        return {tier: len(server.records) for tier, server in self.servers.items()}


def policy(escalate: str, routes: str = "routes:\n  - tier: small\n", more: str = 'cache: {mode: "off"}\n') -> str:
    return f"version: 1\nname: default\nowner: tests\n{routes}{escalate}{more}"


@asynccontextmanager
async def tiered(
    root: Path,
    escalate: str,
    *,
    routes: str = "routes:\n  - tier: small\n",
    more: str = 'cache: {mode: "off"}\n',
    models: dict[str, dict[str, Any]] | None = None,
    settings: dict[str, Any] | None = None,
    wires: dict[str, ScriptWire | AgentWire] | None = None,
) -> AsyncIterator[Tiered]:
    """Models are named `s`, `m` and `l`; the larger, the dearer. `models` changes them by tier, `settings` the file."""
    scripts = {tier: ScriptWire() for tier in TIERS}
    servers = {tier: MockUpstream({**scripts, **(wires or {})}[tier]) for tier in TIERS}
    for server in servers.values():
        await server.start()
    described: dict[str, Any] = {}
    for place, tier in enumerate(TIERS, 1):
        price = {"version": f"{tier}-1", "input_usd_per_million": str(place), "output_usd_per_million": str(10 * place)}
        described[tier[0]] = {"tier": tier, "backend": tier, "capabilities": ABLE, "price": price}
        described[tier[0]] |= (models or {}).get(tier, {})
    document = configuration(servers, described)
    for backend in document["backends"].values():
        backend["attempts"] = 1
    document |= settings or {}
    try:
        async with front_door(root, document, policy=policy(escalate, routes, more)) as door:
            yield Tiered(door, servers, scripts)
    finally:
        for server in servers.values():
            await server.stop()
