"""A function that the model may call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """`parameters`: the JSON schema of its arguments. `strict`: all of it must be enforced."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False

    def properties(self) -> list[tuple[str, Any, bool]]:
        """Name, schema and whether it is required, of each parameter. The schemas have the definitions of the whole."""
        found, required = self.parameters.get("properties"), self.parameters.get("required")
        shared = {key: self.parameters[key] for key in ("$defs", "definitions") if key in self.parameters}
        needed = required if isinstance(required, list) else []
        if not isinstance(found, dict):
            return []
        return [
            (name, shared | schema if isinstance(schema, dict) else schema, name in needed)
            for name, schema in found.items()
        ]
