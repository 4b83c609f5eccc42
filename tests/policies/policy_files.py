"""Policies as text, and a folder to put them in: shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path

EVERYBODY = """\
version: 1
name: everybody
owner: platform
routes:
  - name: long
    when: prompt_tokens > 6000
    tier: large
  - tier: small
"""


def policy(name: str, body: str = "", applies_to: str = "") -> str:
    """A policy with the required keys; `body` and `applies_to` are YAML."""
    scope = f"applies_to: {applies_to}\n" if applies_to else ""
    return f"version: 1\nname: {name}\nowner: tests\n{scope}{body}"


def write(folder: Path, **texts: str) -> Path:
    """Write `NAME.yaml` for each text."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder
