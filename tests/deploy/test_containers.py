"""Dockerfile and docker-compose.yml, checked without Docker: by their own parsers, and that what they name exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import compose_spec
import dockerfile
import pytest
import yaml

from gateway.settings import load

ROOT = Path(__file__).resolve().parents[2]

COMPOSE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "deploy/Dockerfile"


def interpolated(text: str, environment: dict[str, str]) -> str:
    """Replace `${NAME:-default}` and `${NAME:?message}` as Compose does."""

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match["name"], match["kind"], match["rest"]
        if environment.get(name):
            return environment[name]
        if kind == ":?":
            raise KeyError(f"{name}: {rest}")
        return rest or ""

    return re.sub(r"\$\{(?P<name>\w+)(?:(?P<kind>:[-?])(?P<rest>[^}]*))?\}", value, text)


@pytest.fixture
def compose() -> dict[str, Any]:
    passwords = {"POSTGRES_PASSWORD": "p", "GRAFANA_PASSWORD": "g"}
    document = yaml.safe_load(interpolated(COMPOSE.read_text(), passwords))
    assert isinstance(document, dict)
    return document


def validate(document: dict[str, Any]) -> None:
    """Parse by the rules of the Compose specification: unknown keys and malformed values are errors."""
    compose_spec.PyCompose.from_json(json.dumps(document)).validate()


def test_the_compose_file_follows_the_specification(compose: dict[str, Any]) -> None:
    validate(compose)
    compose["services"]["gateway"]["prots"] = ["8080:8080"]
    with pytest.raises(ValueError, match="prots"):
        validate(compose)


def test_it_holds_the_production_shape(compose: dict[str, Any]) -> None:
    assert {"gateway", "cache", "engine", "postgres", "redis", "prometheus", "grafana"} <= set(compose["services"])


def test_everything_that_the_compose_file_names_exists(compose: dict[str, Any]) -> None:
    services = compose["services"]
    targets = {command.value[-1] for command in stages()}
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= set(services), name
        if build := service.get("build"):
            assert (ROOT / build["dockerfile"]).is_file()
            assert build["target"] in targets
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            exists = (ROOT / source).exists() if source.startswith(".") else source in compose["volumes"]
            assert exists, f"{name}: {source}"


def test_passwords_must_be_set_and_the_example_says_so() -> None:
    with pytest.raises(KeyError, match="POSTGRES_PASSWORD"):
        interpolated(COMPOSE.read_text(), {})
    used = set(re.findall(r"\$\{(\w+)", COMPOSE.read_text()))
    offered = re.findall(r"^(\w+)=", (ROOT / "deploy/compose.env.example").read_text(), re.MULTILINE)
    assert used == set(offered)


def test_only_the_gateway_may_be_put_on_the_network_and_our_containers_are_confined(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        if name in ("prepare", "gateway", "cache", "engine"):
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]


def test_the_gateway_has_time_to_drain(compose: dict[str, Any]) -> None:
    settings = load(ROOT / "deploy/tierline.compose.yaml")
    grace = float(compose["services"]["gateway"]["stop_grace_period"].removesuffix("s"))
    assert grace > settings.server.shutdown_delay_seconds + settings.server.drain_seconds


def test_the_platform_file_of_the_containers_fits_the_compose_file(compose: dict[str, Any]) -> None:
    settings = load(ROOT / "deploy/tierline.compose.yaml")
    assert str(settings.storage.data_dir) == "/var/lib/tierline"
    assert settings.database_url().startswith("postgresql+asyncpg://tierline@postgres/")
    assert settings.base_urls("local") == ("http://engine:8101/v1",)
    assert str(settings.run_path("cache.sock")) in DOCKERFILE.read_text()
    assert compose["services"]["postgres"]["environment"]["POSTGRES_USER"] == "tierline"


# --- Dockerfile ------------------------------------------------------------------------------------------------------


def commands() -> list[dockerfile.Command]:
    return list(dockerfile.parse_file(str(DOCKERFILE)))


def stages() -> list[dockerfile.Command]:
    return [command for command in commands() if command.cmd.upper() == "FROM"]


def stage(name: str) -> list[dockerfile.Command]:
    """The commands of one build stage."""
    found: list[dockerfile.Command] = []
    current = ""
    for command in commands():
        if command.cmd.upper() == "FROM":
            current = command.value[-1]
        elif current == name:
            found.append(command)
    return found


@pytest.mark.parametrize("name", ["gateway", "cache", "engine"])
def test_each_image_runs_unprivileged_with_a_healthcheck(name: str) -> None:
    found = {command.cmd.upper(): command for command in stage(name)}
    assert found["USER"].value == ("tierline",)
    assert found["CMD"].value[:2] == ("tierline", name)
    probe = found["HEALTHCHECK"].value
    assert probe[0] == "CMD"
    compile(json.loads(probe[1])[2] if probe[1].startswith("[") else probe[-1], "healthcheck", "exec")


def test_what_is_copied_is_in_the_build_context_and_from_stages_that_exist() -> None:
    names = {command.value[-1] for command in stages()}
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for command in commands():
        if command.cmd.upper() != "COPY":
            continue
        origin = next((flag.removeprefix("--from=") for flag in command.flags if flag.startswith("--from=")), None)
        if origin:
            assert origin in names
            continue
        for source in command.value[:-1]:
            base = source.removeprefix("./")
            assert list(ROOT.glob(base)) or base == "README.md", f"{source} does not exist"
            assert any(base == path or base.startswith(path + "/") for path in allowed), f"{source} is ignored"


def test_every_package_of_the_project_is_built_into_the_images() -> None:
    copied = {command.value[0] for command in commands() if command.cmd.upper() == "COPY"}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"}
    assert packages <= copied


def test_the_torch_range_is_the_projects() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (wanted,) = set(re.findall(r'"(torch>[^"]*)"', project))
    assert f"'{wanted}'" in DOCKERFILE.read_text()
