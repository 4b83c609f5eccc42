"""The commands `tierline policy` and `tierline tiers`, run as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.policy import platform_schema
from tests.command_line import ENVIRONMENT, ROOT, run
from tests.policies.policy_files import EVERYBODY, policy, write

TIERLINE_YAML = """\
version: 1
policies_dir: rules
models: {little: {tier: small, backend: b}}
backends: {b: {base_urls: ["http://127.0.0.1:1/v1"]}}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "tierline.yaml").write_text(TIERLINE_YAML)
    write(tmp_path / "rules", a=EVERYBODY)
    return tmp_path


def test_check_uses_the_configured_folder_and_tiers(home: Path) -> None:
    found = run(home, "policy", "check")
    assert found.returncode == 0, found.stderr
    assert "1 policy checked, no error: everybody" in found.stdout
    # As it can be opened from here.
    assert found.stdout.startswith("rules/a.yaml:7:5: warning: tier 'large' has no model")


def test_a_date_is_text_and_a_scalar_that_means_nothing_has_its_line(home: Path) -> None:
    write(home / "rules", a=f"{EVERYBODY}description: 2020-99-99\n")
    assert run(home, "policy", "check").returncode == 0
    write(home / "rules", a=f"{EVERYBODY}description: !!int abc\n")
    found = run(home, "policy", "check")
    assert found.returncode == 1
    assert "rules/a.yaml:9:14: error: 'abc' is no int." in found.stdout
    assert not found.stderr
    (home / "tierline.yaml").write_text(f"{TIERLINE_YAML}hold_ttl_seconds: !!float x\n")
    for command in (["policy", "check"], ["up", "--prepare-only"], ["gateway"]):
        found = run(home, *command)
        assert found.returncode == 2
        assert "tierline.yaml:5:19: 'x' is no float." in found.stderr
        assert "Traceback" not in found.stderr


def test_a_start_from_nothing_says_the_same(home: Path) -> None:
    """As every other command here, but with the imports of its own that a shell's start has."""
    write(home / "rules", b=policy("b", "rouets: []\n", "{teams: [x]}"))
    for arguments in (["policy", "check"], ["policy", "explain", "--file", "-"], ["tiers", "--help"]):
        command = [sys.executable, "-m", "gateway.cli", *arguments]
        fresh = subprocess.run(
            command, cwd=home, env=ENVIRONMENT, input="{}", capture_output=True, text=True, timeout=60, check=False
        )
        found = run(home, *arguments, stdin="{}")
        assert (found.returncode, found.stdout, found.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)


def test_check_fails_on_errors(home: Path) -> None:
    write(home / "rules", b=policy("b", "rouets: []\n", "{teams: [x]}"))
    found = run(home, "policy", "check")
    assert found.returncode == 1
    assert "b.yaml:5:1: error: unknown key 'rouets'. Did you mean 'routes'?" in found.stdout
    report = json.loads(run(home, "policy", "check", "--json").stdout)
    assert (report["ok"], report["errors"][0]["line"], report["errors"][0]["column"]) == (False, 5, 1)


def test_check_one_file_without_a_configuration(tmp_path: Path) -> None:
    folder = write(tmp_path, a=policy("a", "routes: [{model: anything}]\n", "{teams: [x]}"))
    assert run(tmp_path, "policy", "check", str(folder / "a.yaml")).returncode == 0
    assert run(tmp_path, "policy", "check", str(folder / "none.yaml")).returncode == 2


REQUEST: dict[str, Any] = {"model": "auto", "messages": [{"role": "user", "content": "Say hello"}]}


def test_explain(home: Path) -> None:
    write(home / "rules", b=policy("b", "default: small\n", "{teams: [x]}"))
    (home / "r.json").write_text(json.dumps({**REQUEST, "team": "x"}))
    found = run(home, "policy", "explain", "--file", "r.json")
    assert found.returncode == 0, found.stderr
    assert "policy   b (" in found.stdout
    assert "goes to  tier small" in found.stdout
    other = json.loads(run(home, "policy", "explain", "--file", "-", "--json", stdin=json.dumps(REQUEST)).stdout)
    assert other["policy"]["name"] == "everybody"
    assert other["decision"]["tier"] == "small"
    assert other["facts"]["task"] == "chat"
    option = run(home, "policy", "explain", "--file", "-", "--team", "x", "--json", stdin=json.dumps(REQUEST))
    assert json.loads(option.stdout)["policy"]["name"] == "b"


def test_explain_shows_the_fallback(home: Path) -> None:
    found = run(home, "policy", "explain", "-f", "-", "--tier", "large", "--json", stdin=json.dumps(REQUEST))
    decision = json.loads(found.stdout)["decision"]
    assert (decision["requested_tier"], decision["tier"]) == ("large", "small")
    assert "has no model" in decision["fallback_reason"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting"),
        ("[]", "expected a chat request"),
        ('{"messages": []}', "expected a chat request"),
        ('{"messages": ["x"]}', "expected a chat request"),
        (json.dumps({**REQUEST, "tags": "x"}), "list of NAME=VALUE"),
        (json.dumps({**REQUEST, "team": 3}), "'team' must be text"),
    ],
)
def test_explain_refuses_what_is_no_request(home: Path, text: str, words: str) -> None:
    found = run(home, "policy", "explain", "--file", "-", stdin=text)
    assert found.returncode == 2
    assert words in found.stderr


def test_explain_with_broken_policies(home: Path) -> None:
    write(home / "rules", a="version: 2\n")
    found = run(home, "policy", "explain", "--file", "-", stdin=json.dumps(REQUEST))
    assert found.returncode == 1
    assert "a.yaml:1:" in found.stderr


def test_the_published_platform_schema_is_in_step() -> None:
    published = (ROOT / "docs/reference/tierline.schema.json").read_text()
    hint = "run: tierline policy schema --of tierline --write docs/reference/tierline.schema.json"
    assert published == platform_schema(), hint


PROMPTS = [
    {"messages": [{"role": "user", "content": "Classify as spam or not spam: win money"}], "tier": "small"},
    {"messages": [{"role": "user", "content": "Hi, how are you?"}], "tier": "small", "task": "general chat"},
    {"prompt": "Translate to German: good morning", "task": "translation"},
    {"prompt": "Translate to French: good night", "task": "juggling"},
]


def test_tiers_evaluate(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(p) for p in PROMPTS) + "\n\n")
    found = run(tmp_path, "tiers", "evaluate", "--file", "p.jsonl", "--json")
    assert found.returncode == 0, found.stderr
    data = json.loads(found.stdout)
    assert (data["count"], data["tier_labels"], data["task_labels"]) == (4, 2, 2)
    assert (data["accuracy"], data["tier_accuracy"], data["task_accuracy"]) == (0.5, 0.5, 1.0)
    assert data["tier_within_one"] == 1.0
    assert data["unknown_task_labels"] == ["juggling"]
    assert "juggling" in found.stderr
    assert [d["tier"] for d in data["decisions"]] == ["small", "medium", "medium", "medium"]
    assert "accuracy" in run(tmp_path, "tiers", "evaluate", "--file", "p.jsonl").stdout


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("", 1, "no prompt"),
        ("{", 2, "line 1: not JSON"),
        ('{"prompt": "x"}\n[1]', 2, "line 2: expected an object"),
        ('{"messages": "x"}', 2, "line 1: 'messages' must be"),
        ('{"prompt": "x", "tier": "huge"}', 2, "line 1: there is no tier 'huge'"),
    ],
)
def test_tiers_evaluate_refuses(tmp_path: Path, text: str, code: int, words: str) -> None:
    found = run(tmp_path, "tiers", "evaluate", "--file", "-", stdin=text)
    assert found.returncode == code
    assert words in found.stderr


def test_examples_are_run(home: Path) -> None:
    example = "examples: [{{name: hello, text: Hi, expect: {{tier: {}}}}}]\n"
    write(home / "rules", a=EVERYBODY + example.format("small"))
    found = run(home, "policy", "test")
    assert (found.returncode, found.stdout) == (0, "1 example of 1 policy: all as expected\n"), found.stderr
    write(home / "rules", a=EVERYBODY + example.format("large"))
    found = run(home, "policy", "test", "everybody")
    assert found.returncode == 1
    assert found.stdout.startswith("rules/a.yaml:9:12: failed: 'hello': expected tier 'large', got 'small': 'rule 2'")
    report = json.loads(run(home, "policy", "test", "--json").stdout)
    assert (report["ok"], report["failed"], report["results"][0]["line"]) == (False, 1, 9)
    checked = run(home, "policy", "check")
    assert checked.returncode == 0
    assert "rules/a.yaml:9:12: warning: example 'hello' fails" in checked.stdout
    assert run(home, "policy", "test", "evrybody").returncode == 2
    write(home / "rules", a="version: 2\n")
    assert run(home, "policy", "test").returncode == 1


def test_versions_are_shown_and_compared(home: Path) -> None:
    import asyncio

    from gateway.ledger.database import Database
    from gateway.ledger.policy_versions import PolicyVersion, keep

    assert run(home, "policy", "history").returncode == 1
    old = EVERYBODY.replace("6000", "4000")

    async def fill() -> None:
        database = await Database.open(f"sqlite:///{home}/var/tierline.db")
        for number, text in enumerate((old, EVERYBODY)):
            moment, version = 1_700_000_000_000 + number, f"{number}abcdef01234"
            await keep(
                database,
                [
                    PolicyVersion(
                        name="everybody", version=version, file="a.yaml", text=text, seen_by="h/1",
                        first_seen_ms=moment, last_seen_ms=moment,
                    )
                ],
            )  # fmt: skip
        await database.close()

    asyncio.run(fill())
    listed = run(home, "policy", "history", "everybody")
    assert [line.split()[1] for line in listed.stdout.splitlines()[1:]] == ["1abcdef01234", "0abcdef01234"]
    assert json.loads(run(home, "policy", "history", "--json").stdout)[0]["version"] == "1abcdef01234"
    assert run(home, "policy", "show", "everybody@0abc").stdout == old
    assert run(home, "policy", "show", "everybody").stdout == EVERYBODY
    changed = run(home, "policy", "diff", "everybody@0abc")
    assert changed.returncode == 1
    assert "-    when: prompt_tokens > 4000\n+    when: prompt_tokens > 6000\n" in changed.stdout
    assert run(home, "policy", "diff", "everybody@1abc", "rules/a.yaml").returncode == 0
    for wrong in ("everybody@ffff", "everybdy", "none.yaml"):
        found = run(home, "policy", "show", wrong)
        assert found.returncode == 2, found.stderr
        assert "Traceback" not in found.stderr
