"""What an editor makes of the published schema: the files that ship fit it, and a language server completes with it.

The server is Red Hat's `yaml-language-server` (`npm install -g yaml-language-server`), which most editors use for YAML.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from policies.yamlfile import parse

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "policies/schema.json"
LINE = f"# yaml-language-server: $schema={SCHEMA.as_uri()}\n"


def test_the_policies_that_ship_fit_the_published_schema() -> None:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in (ROOT / "policies").glob("*.yaml"):
        text = path.read_text()
        validator.validate(parse(text, path.name).data)
        assert text.startswith("# yaml-language-server: $schema=schema.json\n")  # only there it counts
        wrong = {**yaml.safe_load(text), "rouets": []}
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(wrong)


class Server:
    """A language server, spoken to over its standard input and output."""

    def __init__(self, command: str) -> None:
        self.process = subprocess.Popen([command, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.number = 0
        self.published: dict[str, list[Any]] = {}
        root = ROOT.as_uri()
        self.ask("initialize", {"processId": os.getpid(), "rootUri": root, "capabilities": {}})
        self.tell("initialized", {})

    def tell(self, method: str, parameters: Any) -> None:
        self._send({"method": method, "params": parameters})

    def ask(self, method: str, parameters: Any) -> Any:
        self.number += 1
        self._send({"id": self.number, "method": method, "params": parameters})
        while True:
            message = self.next()
            if message.get("id") == self.number and "method" not in message:
                return message["result"]

    def open(self, text: str, name: str) -> str:
        uri = (ROOT / "policies" / name).as_uri()
        document = {"uri": uri, "languageId": "yaml", "version": 1, "text": text}
        self.tell("textDocument/didOpen", {"textDocument": document})
        return uri

    def complaints(self, uri: str) -> list[str]:
        while uri not in self.published:
            self.next()
        return [item["message"] for item in self.published[uri]]

    def completed(self, uri: str, line: int, character: int) -> dict[str, str]:
        """What may stand there, and what the schema says of it."""
        where = {"textDocument": {"uri": uri}, "position": {"line": line, "character": character}}
        found = self.ask("textDocument/completion", where)
        items = found["items"] if isinstance(found, dict) else found
        return {item["label"]: str(item.get("documentation") or "") for item in items}

    def next(self) -> dict[str, Any]:
        """The next message; what the server asks is answered with nothing, what it publishes is kept."""
        assert self.process.stdout is not None
        length = 0
        while line := self.process.stdout.readline().strip():
            name, _, value = line.decode().partition(":")
            length = int(value) if name.lower() == "content-length" else length
        assert length, "the language server ended"
        message: dict[str, Any] = json.loads(self.process.stdout.read(length))
        if message.get("method") == "textDocument/publishDiagnostics":
            self.published[message["params"]["uri"]] = message["params"]["diagnostics"]
        elif "id" in message and "method" in message:
            items = message["params"].get("items") if isinstance(message.get("params"), dict) else None
            self._send({"id": message["id"], "result": [None] * len(items) if items else None})
        return message

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def server() -> Iterator[Server]:
    command = os.environ.get("YAML_LANGUAGE_SERVER") or shutil.which("yaml-language-server")
    if command is None:
        pytest.skip("yaml-language-server is not installed (npm): completion in an editor is NOT tested")
    running = Server(command)
    yield running
    running.close()


def test_an_editor_completes_and_complains(server: Server) -> None:
    uri = server.open(f"{LINE}version: 1\nname: x\nowner: me\nrouts: []\ncache:\n  mode: semnatic\n", "edited.yaml")
    complaints = server.complaints(uri)
    assert any("routs" in text for text in complaints), complaints
    assert any("semantic" in text for text in complaints), complaints
    uri = server.open(f"{LINE}version: 1\nname: x\nowner: me\n\nroutes:\n  - tier: \n", "completed.yaml")
    keys = server.completed(uri, 4, 0)
    assert {"default", "budget", "cache", "examples", "fallback"} <= keys.keys()
    assert "Tiers to try" in keys["fallback"]
    assert {"small", "medium", "large", "xlarge", "auto"} <= server.completed(uri, 6, 10).keys()


def test_the_line_in_the_shipped_policies_is_found(server: Server) -> None:
    text = (ROOT / "policies/support.yaml").read_text()
    assert server.complaints(server.open(text, "support.yaml")) == []
    assert any("ownr" in one for one in server.complaints(server.open(text.replace("owner:", "ownr:"), "mine.yaml")))
