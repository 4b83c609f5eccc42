"""The error table of the handbook names every code that a client can get, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from backends.attempt import NoBackendKind

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/application-developer.md").read_text()


def trees(*folders: str) -> Iterator[ast.Module]:
    """Without the commands, whose codes are those of a shell, and the admin API, which has a page of its own."""
    yield from trees_of(*folders, without=("cli", "admin"))


def trees_of(*folders: str, without: tuple[str, ...] = ()) -> Iterator[ast.Module]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not set(without) & set(path.parts):
                yield ast.parse(path.read_text())


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call, ast.expr | None]]:
    """Each call: the name of what is called, the call, and its argument `code`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield name, node, next((keyword.value for keyword in node.keywords if keyword.arg == "code"), None)


def texts(expression: ast.AST) -> Iterator[str]:
    """The texts that an expression can be: constants, and `backend_…` with every way in which backends fail."""
    if isinstance(expression, ast.JoinedStr):
        assert ast.unparse(expression) == "f'backend_{error.kind}'", "a code that this test cannot spell out"
        yield from (f"backend_{kind}" for kind in get_args(NoBackendKind))
    elif isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        yield expression.value
    elif not isinstance(expression, ast.Call):  # the arguments of a call are no codes
        for child in ast.iter_child_nodes(expression):
            yield from texts(child)


def class_codes(path: str) -> dict[str, str]:
    """The code of each class of a file that has one of its own."""
    return {
        node.name: ast.literal_eval(line.value)
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "code"
    }


FOR_OPERATORS = ("adapters.py", "reloading.py")  # of the engine, not passed on by gateways


def emitted() -> set[str]:
    """What the gateway says itself, what its HTTP edge says, and what engine and embedder refuse, passed on."""
    named = {**class_codes("gateway/dialects/errors.py"), "InvalidRequest": "invalid_value"}
    found: set[str] = set()
    for tree in trees("gateway", "backends", "edge"):
        for name, call, code in calls(tree):
            if code is not None:
                found.update(texts(code))
            elif name in named:
                found.add(named[name])
            elif name == "Refused" and len(call.args) == 3:  # of the edge: status, code, message
                found.update(texts(call.args[1]))
        # `kind = OutOfBudget if … else RateLimited`, called without a code.
        for node in ast.walk(tree):
            if isinstance(node, ast.IfExp):
                found.update(named[part.id] for part in (node.body, node.orelse) if getattr(part, "id", "") in named)
    found.update(class_codes("gateway/access/principal.py").values())  # answered with the code of the key's fault
    # What gateways and operators ask engines, no client hears of.
    for tree in trees_of("engine/server", without=("pages.py", *FOR_OPERATORS)):
        for name, call, code in calls(tree):
            status = call.args[0] if call.args else None
            if name == "ApiError" and isinstance(status, ast.Constant) and status.value in (400, 404) and code:
                found.update(texts(code))
    for name, call, _ in calls(ast.parse((ROOT / "cache/embedding/http.py").read_text())):
        if name == "_Failed" and ast.literal_eval(call.args[0]) == 400:
            found.update(texts(call.args[2]))
    return found


def documented() -> set[str]:
    table = PAGE.split("## Errors")[1].split("\n## ")[0]
    rows = re.findall(r"^\| \d(?:\d\d|xx) \| (.+?) \|", table, re.MULTILINE)
    return {code for row in rows for code in re.findall(r"`([a-z_]+)`", row)}


def test_every_code_is_in_the_table_and_no_other() -> None:
    assert emitted() - documented() == set(), "not in the table of docs/application-developer.md"
    assert documented() - emitted() == set(), "in the table, but nothing answers with it"


def test_codes_for_operators_are_in_the_reference_of_the_engine() -> None:
    reference = (ROOT / "docs/reference/engine.md").read_text()
    found = {
        text
        for name in FOR_OPERATORS
        for call, _, code in calls(ast.parse((ROOT / "engine/server" / name).read_text()))
        if call == "ApiError" and code is not None
        for text in texts(code)
    }
    assert {"adapter_refused", "adapter_not_found", "reload_failed", "reload_disabled"} <= found
    assert {code for code in found if f"`{code}`" not in reference} == set()


def test_the_collection_finds_codes_of_every_kind() -> None:
    found = emitted()
    for code in ("invalid_json", "expired_api_key", "budget_exhausted", "backend_timeout", "backend_refused"):
        assert code in found
    for code in ("invalid_value", "unknown_parameter", "invalid_messages", "internal_error"):
        assert code in found
