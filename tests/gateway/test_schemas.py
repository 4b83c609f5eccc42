"""Schemas that clients write: what fits, what does not, and what no schema can do to the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from gateway.escalating import schemas
from gateway.escalating.schemas import Schemas


@pytest_asyncio.fixture
async def compiled() -> AsyncIterator[Schemas]:
    made = Schemas()
    yield made
    made.close()


TREE = {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}


@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [
        ({"type": "object", "required": ["a"]}, {"a": 1}, True),
        ({"type": "object", "required": ["a"]}, {}, False),
        ({"type": "object", "additionalProperties": False}, {"b": 1}, False),
        ({"enum": ["red", "green"]}, "blue", False),
        ({"type": "string", "pattern": "^[a-z]+$"}, "abc", True),
        ({"type": "string", "pattern": "^[a-z]+$"}, "ABC", False),
        ({"pattern": "^a$"}, 7, True),
        ({"properties": {"pattern": {"type": "integer"}}}, {"pattern": "x"}, False),
        (TREE, {"next": {"next": {}}}, True),
        (TREE, {"next": 1}, False),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {}, "type": "null"}, None, True),
        ({"type": "array", "uniqueItems": True}, [1, 1], False),
        ({}, "anything", True),
    ],
)
async def test_what_fits(compiled: Schemas, schema: dict[str, Any], value: Any, fits: bool) -> None:
    assert await compiled.fits(schema, value) is fits
    assert await compiled.fits(schema, value) is fits  # kept


def fan(depth: int) -> dict[str, Any]:
    """A schema whose check takes 2 to the power of `depth` steps."""
    steps: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": {**steps, f"d{depth}": {"type": "number"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (fan(40), "x"),
        ({"$ref": "#"}, "x"),
        ({"$ref": "http://127.0.0.1:9/schema.json"}, "x"),
        ({"$ref": "file:///etc/passwd"}, "x"),
        ({"type": "strange"}, "x"),
        ({"required": 7}, {}),
        ({"type": "string", "pattern": "(?=a)a"}, "a"),
        ({"type": "string", "pattern": "("}, "a"),
        ({"type": "string", "pattern": r"(\w{500}){500}"}, "a" * 400),
        ({"patternProperties": {"(a+)+$": {}}, "additionalProperties": False}, {"a" * 40 + "b": 1}),
        ({"type": "array", "items": {"type": "integer"}}, list(range(50_000))),
        ({"type": "array", "uniqueItems": True}, [{"a": i} for i in range(2000)]),
        ({"description": "x" * 70_000}, 1),
        ({"multipleOf": 0.1}, 10**400),
    ],
)
async def test_what_cannot_be_told_is_not_called_wrong(compiled: Schemas, schema: dict[str, Any], value: Any) -> None:
    assert await compiled.fits(schema, value) is None
    assert await compiled.fits({"type": "integer"}, 1) is True


async def test_a_pattern_on_which_others_never_end_is_decided(compiled: Schemas) -> None:
    assert await compiled.fits({"type": "string", "pattern": "^(a+)+$"}, "a" * 5000 + "b") is False


async def test_the_number_of_kept_schemas_is_bounded(compiled: Schemas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "MOST_KEPT", 3)
    for most in range(6):
        assert await compiled.fits({"maximum": most}, most) is True
    assert len(compiled._kept) == 3
