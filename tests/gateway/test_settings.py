"""`tierline.yaml`: every fault is refused with its line, and names that point nowhere get a suggestion."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway import settings
from policies.yamlfile import InvalidFile

GOOD = """\
version: 1
models:
  tiny:
    tier: small
    backend: local
backends:
  local: {engine: tiny}
engines:
  tiny: {model: tiny, port: 8101}
"""


def load(tmp_path: Path, text: str, *, here: bool = True) -> settings.Settings:
    path = tmp_path / "tierline.yaml"
    path.write_text(text)
    return settings.load(path, here=here)


def test_the_shipped_file_is_valid() -> None:
    loaded = settings.load(Path(__file__).parents[2] / "tierline.yaml")
    assert loaded.tiers_served() == ["small"]


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    loaded = load(tmp_path, GOOD)
    assert loaded.storage.data_dir == tmp_path / "var"
    assert loaded.policies_dir == tmp_path / "policies"
    assert loaded.base_urls("local") == ("http://127.0.0.1:8101/v1",)
    assert loaded.run_path("cache.sock") == tmp_path / "var" / "run" / "cache.sock"


@pytest.mark.parametrize(
    ("old", "new", "line", "message", "suggestion"),
    [
        ("tier: small", "teir: small", 4, "unknown key 'teir'", "tier"),
        ("tier: small", "tier: smal", 4, "'models.tiny.tier' must be one of", "small"),
        ("backend: local", "backend: lokal", 5, "backend 'lokal' of model 'tiny' is not in 'backends'", "local"),
        ("{engine: tiny}", "{engine: tinny}", 7, "engine 'tinny' of backend 'local' is not in 'engines'", "tiny"),
        ("port: 8101", "port: 8080", 9, "port 8080 is taken by the gateway", None),
        ("port: 8101", "port: 99999", 9, "less than or equal to 65535", None),
        ("{engine: tiny}", "{engine: tiny, base_urls: ['http://a']}", 7, "give either 'engine', 'embedder", None),
        ("{engine: tiny}", "{base_urls: ['ftp://a']}", 7, "starts with http:// or https://", None),
        (
            "{engine: tiny}",
            "{base_urls: ['http://a/v1'], output_limit_field: max_token}",
            7,
            "must be one of",
            "max_tokens",
        ),
        (
            "{engine: tiny}",
            "{base_urls: ['http://a/v1'], dialect: anthropic, output_limit_field: max_tokens}",
            7,
            "only servers of the dialect openai that chat",
            None,
        ),
        ("  tiny:\n    tier", "  auto:\n    tier", 3, "'auto' lets the policy choose", None),
        ("version: 1", "version: 1\nserver: {workers: 4}", 2, "needs storage.redis_url", None),
        ("version: 1", "version: 1\nstorage: {redis_url: 'http://a'}", 2, "'storage.redis_url'", None),
        ("{engine: tiny}", "{embedder: true}", 7, "needs cache.embeddings_port", None),
        ("tier: small", "tier: small\n    kind: embedding", 3, "only a chat model has a 'tier'", None),
        ("version: 1", "version: 1\nversion: 1", 2, "stands twice", None),
        ("version: 1", "version: 1\nadmin: {listen: '127.0.0.1:8080'}", 2, "port 8080 is taken by the gateway", None),
        ("version: 1", "version: 1\nadmin: {listen: '127.0.0.1:70000'}", 2, "there is no port 70000", None),
        ("version: 1", "version: 1\nadmin: {listen: '8090'}", 2, "'admin.listen'", None),
        ("version: 1", "version: 1\nadmin: {enable: true}", 2, "unknown key 'enable'", "enabled"),
        ("version: 1", "version: 1\nserver: {max_body_bytes: 300000000}", 2, "more than max_held_body_bytes", None),
        ("version: 1", "version: [", 1, "not valid YAML", None),
        ("version: 1", "version: 1\npolicies_dir: polices", 2, "/polices is not there", "policies"),
        ("version: 1", "version: 1\npolicies_dir: tierline.yaml", 2, "/tierline.yaml is no folder", None),
        ("version: 1", "version: 1\npolicies_dir: ''\nmodles: {}", 3, "unknown key 'modles'", "models"),
        ("version: 1", "version: 1\ncache: {embedder: all-minilm-l6-v2}", 2, "neither a bundled", "all-MiniLM-L6-v2"),
        ("version: 1", "version: 1\ncache: {embedder: ./model}", 2, "neither a bundled model", None),
        ("version: 1", "version: 1\ncache: {embedder: ''}", 2, "neither a bundled model", None),
        ("version: 1", "version: 1\nserver:\n  host: ${HOST}", 3, "'${HOST}' stands for itself", None),
        ("version: 1", "version: 1\nserver:\n  port: ${PORT:-80}", 3, "'${PORT:-80}' stands for itself", None),
        ("version: 1", "version: 1\nserver: {host: ${HOST}}", 2, "environment variables are not put into", None),
        ("{engine: tiny}", "{base_urls: ['http://a', 'http://${B}/v1']}", 7, "'${B}' stands for itself", None),
        ("  tiny:\n    tier", "  ${MODEL}:\n    tier", 3, "'${MODEL}' stands for itself", None),
    ],
)
def test_faults_are_refused_with_their_line(
    tmp_path: Path, old: str, new: str, line: int, message: str, suggestion: str | None
) -> None:
    (tmp_path / "policies").mkdir()
    with pytest.raises(InvalidFile) as caught:
        load(tmp_path, GOOD.replace(old, new, 1))
    problem = caught.value.problems[0]
    assert message in problem.message
    assert (problem.line, problem.suggestion) == (line, suggestion)
    assert str(problem).startswith(f"{tmp_path}/tierline.yaml:{line}:")


@pytest.mark.parametrize(
    ("old", "new", "where", "message"),
    [
        ("  tiny:\n    tier", '  "ti\\r\\nny":\n    tier', (3, 3), "'\\r' cannot stand in a text"),
        ("  tiny:\n    tier", '  "ti\\nny":\n    tier', (3, 3), "one line of printable characters"),
        ("  tiny:\n    tier", '  " tiny":\n    tier', (3, 3), "without blanks around it"),
        ("  tiny:\n    tier", f"  {'t' * 300}:\n    tier", (3, 3), "at most 256 characters"),
        ("  tiny:\n    tier", '  "":\n    tier', (3, 3), "must not be empty"),
        ("tier: small", 'tier: small\n    upstream_model: "a\\nb"', (5, 5), "one line of printable characters"),
        ("  local:", '  "lo\\ncal":', (7, 3), "one line of printable characters"),
        ("  tiny: {model", "  ../tiny: {model", (9, 3), "must match pattern"),
        ("{engine: tiny}", "{base_urls: ['http://a b']}", (7, 23), "a base URL is ASCII without blanks"),
        ("{engine: tiny}", "{base_urls: ['http://é']}", (7, 23), "a base URL is ASCII without blanks"),
        ("{engine: tiny}", "{base_urls: ['http://']}", (7, 23), "a base URL looks like"),
        ("{engine: tiny}", "{base_urls: ['http://a:99999']}", (7, 23), "Port out of range"),
        ("{engine: tiny}", "{base_urls: ['http://a?b=c']}", (7, 23), "a base URL has no query"),
        (
            "{engine: tiny}",
            '{base_urls: ["http://a"], headers: {x-a: "b\\r\\nc: d"}}',
            (7, 51),
            "cannot stand in a text",
        ),
        ("{engine: tiny}", '{base_urls: ["http://a"], headers: {x-a: "b\\nc: d"}}', (7, 46), "no line break"),
        ("{engine: tiny}", '{base_urls: ["http://a"], headers: {x-a: "…"}}', (7, 46), "beyond Latin-1"),
        ("{engine: tiny}", '{base_urls: ["http://a"], headers: {"x a": b}}', (7, 46), "'x a' is not a header name"),
        ("{engine: tiny}", '{base_urls: ["http://a"], headers: {Host: b}}', (7, 46), "is set by the gateway itself"),
        ("{engine: tiny}", '{base_urls: ["http://a"], headers: {x-a: b, X-A: c}}', (7, 3), "a name twice"),
        (
            "{engine: tiny}",
            f'{{base_urls: ["http://a"], headers: {{x: {"b" * 5000}}}}}',
            (7, 46),
            "at most 4,096 characters",
        ),
        ("version: 1", "version: 1\nhold_ttl_seconds: .inf", (2, 1), "finite number"),
        ("version: 1", "version: 1\nhold_ttl_seconds: !!float x", (2, 19), "'x' is no float"),
    ],
)
def test_what_is_sent_and_logged_is_checked_where_it_stands(
    tmp_path: Path, old: str, new: str, where: tuple[int, int], message: str
) -> None:
    assert old in GOOD
    with pytest.raises(InvalidFile) as caught:
        load(tmp_path, GOOD.replace(old, new, 1))
    problem = caught.value.problems[0]
    assert message in problem.message
    assert (problem.line, problem.column) == where
    assert str(problem).splitlines() == [str(problem)]


def test_names_and_headers_that_people_use_are_taken(tmp_path: Path) -> None:
    names = ("meta-llama/Llama-3.1-8B-Instruct", "qwen3:8b", "Größe 1", "gpt-4o@eu")
    models = "".join(f'  "{name}": {{tier: small, backend: "a/b c"}}\n' for name in names)
    backend = '  "a/b c": {base_urls: ["https://h:8000/v1"], headers: {X-Org: "Müller & Söhne, a\tb"}}\n'
    loaded = load(tmp_path, f"version: 1\nmodels:\n{models}backends:\n{backend}")
    assert tuple(loaded.models) == names


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match="cannot be read"):
        settings.load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    "name", ["all-MiniLM-L6-v2", "intfloat/e5-small-v2", "universal-sentence-encoder-multilingual"]
)
def test_embedders_by_name(tmp_path: Path, name: str) -> None:
    assert load(tmp_path, f"{GOOD}cache: {{embedder: {name}}}\n").cache.embedder == name


def test_an_embedder_may_be_a_folder_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "own/model").mkdir(parents=True)
    for written in ("own/model", str(tmp_path / "own/model")):
        loaded = load(tmp_path, f"{GOOD}cache: {{embedder: {written}}}\n")
        assert loaded.cache.embedder == str(tmp_path / "own/model")


def test_an_embedder_that_is_not_used_is_not_looked_for(tmp_path: Path) -> None:
    assert not load(tmp_path, f"{GOOD}cache: {{enabled: false, embedder: none}}\n").cache.enabled


def test_what_lies_on_another_machine_is_not_looked_for(tmp_path: Path) -> None:
    """The gateway in one container, the cache with its model in another."""
    text = f"{GOOD}policies_dir: none\ncache: {{embedder: /models/none}}\n"
    assert load(tmp_path, text, here=False).cache.embedder == "/models/none"
    with pytest.raises(InvalidFile) as caught:
        load(tmp_path, text)
    assert [problem.line for problem in caught.value.problems] == [10, 11]


def test_the_place_of_a_setting(tmp_path: Path) -> None:
    load(tmp_path, f"{GOOD}server:\n  host: nowhere\n")
    path = tmp_path / "tierline.yaml"
    assert settings.where(path, ("server", "host")) == f"{path}:11:3: "
    assert settings.where(path, ("server", "port")) == ""
