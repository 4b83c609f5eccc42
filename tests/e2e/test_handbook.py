"""What the handbook shows is what happens: its commands and programs run, and print what stands there.

In an expected output `...` stands for anything, and a run of blanks for any other.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, Stack, start_stack

PRODUCT_OWNER = (ROOT / "docs/product-owner.md").read_text()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Stack]:
    """A fresh installation that has answered one question, and from whose folder a reader types."""
    started = start_stack(tmp_path_factory.mktemp("handbook"), smollm2_path, settings={"cache": {"enabled": False}})
    yield started
    assert started.stop() == 0


def fenced(page: str, language: str = "") -> list[str]:
    """The fenced blocks of a page in one language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for name, text in blocks if name == language]


def sessions(page: str) -> list[str]:
    """Blocks of commands, each after `$ `, and what they print."""
    return [block for block in fenced(page) if block.startswith("$ ")]


def shell(stack: Stack, command: str) -> str:
    """What a command prints, in the folder of the installation."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TIERLINE_CONFIG", "COLUMNS", "FORCE_COLOR")
    }
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=stack.config.parent, env=environment, timeout=120, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.stdout


def check_session(stack: Stack, block: str) -> None:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        printed = shell(stack, command)
        pattern = ".*?".join(re.escape(_one_blank(piece)) for piece in expected.split("..."))
        assert re.fullmatch(pattern, _one_blank(printed), re.DOTALL), (
            f"$ {command}\n--- the page says\n{expected}\n--- it printed\n{printed}"
        )


def _one_blank(text: str) -> str:
    return re.sub(r" +", " ", text).strip()


@pytest.mark.parametrize("page", ["README.md", "docs/application-developer.md"])
def test_the_first_program_runs(stack: Stack, page: str) -> None:
    program = fenced((ROOT / page).read_text(), "python")[0]
    assert "http://127.0.0.1:8080/v1" in program
    program = program.replace("http://127.0.0.1:8080", stack.base_url)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=stack.config.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said = re.search(r"print\(.*\)  # (.*)", program)
    if said:
        assert done.stdout.strip() == said[1]
    assert "Paris" in done.stdout


def test_the_product_owners_first_policy(stack: Stack) -> None:
    policy = fenced(PRODUCT_OWNER, "yaml")[0]
    (stack.config.parent / "request.json").write_text(fenced(PRODUCT_OWNER, "json")[0])
    # What needs a week of traffic is tested where there is some: simulations and rollouts have tests of their own.
    ran = [block for block in sessions(PRODUCT_OWNER) if re.match(r"\$ tierline policy (check|explain) ?", block)]
    assert len(ran) == 3
    for block in ran:
        typo = "clasification" in block
        written = policy.replace('"classification"', '"clasification"') if typo else policy
        assert typo == (written != policy)
        (stack.policies_dir / "my-team.yaml").write_text(written)
        check_session(stack, block)


def test_the_product_owners_examples(stack: Stack) -> None:
    policy, *others = fenced(PRODUCT_OWNER, "yaml")
    examples = next(snippet for snippet in others if snippet.startswith("examples:"))
    ran = [block for block in sessions(PRODUCT_OWNER) if block.startswith("$ tierline policy test")]
    for block, limit in zip(ran, ("6000", "60000"), strict=True):
        text = f"{policy}\n{examples}".replace("> 6000", f"> {limit}")
        (stack.policies_dir / "my-team.yaml").write_text(text)
        check_session(stack, block)


@pytest.mark.parametrize("snippet", fenced(PRODUCT_OWNER, "yaml")[1:])
def test_the_product_owners_other_snippets(stack: Stack, snippet: str, tmp_path: Path) -> None:
    head = "" if snippet.startswith("name:") else "name: mine\n"
    (tmp_path / "mine.yaml").write_text(f"version: 1\nowner: me\n{head}{snippet}")
    assert shell(stack, f"tierline policy check {tmp_path}/mine.yaml").endswith(", no error: " + _name(head + snippet))


def _name(policy: str) -> str:
    return policy.partition("name: ")[2].partition("\n")[0] + "\n"


def test_the_product_owners_conditions(stack: Stack, tmp_path: Path) -> None:
    table = PRODUCT_OWNER.partition("| you want | write |")[2].partition("\n\n")[0]
    codes = [code.replace("\\|", "|") for code in re.findall(r"`([^`]+)`", table)]
    conditions = [code for code in codes if re.search(r"[=<>(]|\bin\b", code) and not code.startswith("x-")]
    assert len(conditions) >= 10
    routes = "\n".join(f"  - {{when: {_quoted(condition)}, tier: small}}" for condition in conditions)
    (tmp_path / "mine.yaml").write_text(f"version: 1\nname: mine\nowner: me\nroutes:\n{routes}\n")
    assert "no error" in shell(stack, f"tierline policy check {tmp_path}/mine.yaml")


def _quoted(condition: str) -> str:
    return "'" + condition.replace("'", "''") + "'"


def test_the_examples_of_the_command_line(stack: Stack) -> None:
    question = '{"model": "auto", "messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    authorization = '-H "Authorization: Bearer $(cat var/first-key)"'
    assert "Paris" in shell(stack, f"curl -s {stack.base_url}/v1/chat/completions {authorization} -d '{question}'")
    stack.wait_for_ledger()
    blocks = sessions((ROOT / "docs/reference/cli.md").read_text())
    assert len(blocks) == 3
    for block in blocks:
        check_session(stack, block)
