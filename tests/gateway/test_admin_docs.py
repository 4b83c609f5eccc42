"""The page of the admin API: its lines run and print what stands there; it names every route and code, and no other."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

from gateway.admin.routes import ADMIN_ROUTES
from tests.gateway.admin_door import admin
from tests.gateway.front_door import FrontDoor
from tests.gateway.test_error_codes import calls, class_codes, texts, trees_of

PAGE = (Path(__file__).resolve().parents[2] / "docs/reference/admin-api.md").read_text()


async def test_the_lines_of_the_page_run(door: FrontDoor) -> None:
    someone = await admin(door)
    await door.chat()
    await door.rows()
    key_file = door.root / "var" / "admin-key"
    key_file.write_text(someone.token)
    blocks = re.findall(r"^```\n(\$ .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    parts = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    assert len(parts) == 11
    for part in parts:
        command, _, expected = part.partition("\n")
        assert "http://127.0.0.1:8080/admin/v1/" in command
        command = command.replace("http://127.0.0.1:8080", door.url)
        done = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-c", command],
            cwd=door.root,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        expected = expected.strip().replace("first-admin-key", "tester")
        pattern = ".*".join(re.escape(piece) for piece in expected.split("..."))
        assert re.fullmatch(pattern, done.stdout.strip(), re.DOTALL), (
            f"{command}\n{expected}\n--- printed\n{done.stdout}"
        )


def test_the_page_names_every_route_and_no_other() -> None:
    rows = re.findall(r"^\| (`(?:GET|POST|PATCH).*?) \|", PAGE, re.MULTILINE)
    named = {path for row in rows for path in re.findall(r"/admin/v1/[a-z_./{}]+", row)}
    assert named == {route.path for route in ADMIN_ROUTES}


def test_the_page_names_every_code_and_no_other() -> None:
    table = PAGE.split("## Errors")[1]
    documented = {code for row in re.findall(r"^\| \d{3} \| (.+?) \|", table, re.MULTILINE)
                  for code in re.findall(r"`([a-z_]+)`", row)}  # fmt: skip
    named = {**class_codes("gateway/dialects/errors.py"), **class_codes("gateway/admin/errors.py")}
    emitted = set(class_codes("gateway/access/admin_keys.py").values())
    emitted |= {"expired_api_key", "revoked_api_key"}  # of `authenticate_admin`, answered with the code of the fault
    for tree in trees_of("gateway/admin"):
        for name, _, code in calls(tree):
            emitted |= (
                set(texts(code))
                if code is not None
                else {named[name]} & set(named.values())
                if name in named
                else set()
            )
    assert emitted == documented
