"""`tierline doctor`: its C compiler is the engine's; a model file that is cut short is found."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from engine.layers import native
from gateway import doctor
from gateway.models.catalog import CATALOG, CatalogEntry
from gateway.models.store import ModelStore
from gateway.settings import load
from tests.gateway.commands import configuration


def test_doctor_looks_for_the_compilers_that_the_engine_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def which(name: str) -> None:
        asked.append(name)

    monkeypatch.setattr(shutil, "which", which)
    with pytest.raises(native.NativeBuildError, match="no C compiler found"):
        native.build()
    by_engine = asked.copy()
    asked.clear()
    finding = doctor._compiler()
    assert asked == by_engine != []
    assert (finding.status, "no C compiler" in finding.message) == ("warn", True)


@pytest.mark.parametrize(("program", "status"), [("cc", "ok"), ("clang", "ok"), ("g++", "warn"), ("c++", "warn")])
def test_doctor_wants_a_c_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, status: str) -> None:
    (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._compiler().status == status


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    """A catalogue model of 64 bytes."""
    data = b"GGUF".ljust(64, b"\1")
    sha256 = hashlib.sha256(data).hexdigest()
    entry = dataclasses.replace(CATALOG["smollm2-135m"], name="small", sha256=sha256, size_bytes=len(data))
    monkeypatch.setitem(CATALOG, "small", entry)
    return entry


def model_finding(config: Path, model: str) -> doctor.Finding:
    (finding,) = doctor._models(load(config), config.parent)
    assert finding.check == f"model {model}"
    return finding


@pytest.mark.parametrize("size", [0, 3, 63, 65])
@pytest.mark.parametrize("stamped", [True, False])
def test_doctor_compares_a_models_size(tmp_path: Path, small: CatalogEntry, size: int, stamped: bool) -> None:
    """Looking at the time of the last change alone calls a file that a full disk cut short unverified, and so ok."""
    config = configuration(tmp_path, engine="{model: small}")
    source = tmp_path / small.file_name
    source.write_bytes(b"GGUF".ljust(64, b"\1"))
    pulled = ModelStore(tmp_path / "data").pull_from(source, "small").model
    assert model_finding(config, "small") == doctor.Finding("model small", "ok", f"{pulled.path} (checksum verified)")
    if not stamped:
        (pulled.path.parent / "model.json").unlink()
    os.utime(pulled.path, (1, 1))
    whole = model_finding(config, "small")
    assert (whole.status, "verified at the next start" in whole.message) == ("ok", True)
    pulled.path.write_bytes(b"GGUF".ljust(65, b"\1")[:size])
    cut = model_finding(config, "small")
    assert (cut.status, f"has {size} bytes, 64 were expected" in cut.message) == ("fail", True)
    assert cut.advice == "tierline models pull small --force"


def test_doctor_looks_into_files_of_your_own(tmp_path: Path) -> None:
    config = configuration(tmp_path, engine="{model: own}")
    source = tmp_path / "weights.gguf"
    source.write_bytes(b"GGUF" + b"\2" * 60)
    pulled = ModelStore(tmp_path / "data").pull_from(source, "own").model
    for size, status in ((64, "ok"), (63, "fail"), (65, "warn")):
        if size != 64:
            pulled.path.write_bytes(b"GGUF".ljust(size, b"\2"))
        assert model_finding(config, "own").status == status
    by_path = configuration(tmp_path, engine="{model: weights.gguf}")
    assert model_finding(by_path, "weights.gguf").status == "ok"
    for content, words in ((b"", "is empty"), (b"<html>", "is no GGUF file")):
        source.write_bytes(content)
        finding = model_finding(by_path, "weights.gguf")
        assert (finding.status, words in finding.message) == ("fail", True)


@pytest.mark.parametrize(
    ("prefix", "arguments", "said"),
    [
        ("/home/me/.pyenv/versions/3.11.7", "'--prefix=/home/me/.pyenv/versions/3.11.7' '--enable-shared'", True),
        ("/opt/python", "'--enable-optimizations' '--with-lto'", False),
        ("/usr", "'--enable-shared' '--prefix=/usr'", False),  # Debian's, which is optimised without saying so
    ],
)
def test_a_python_without_optimisation_is_named(
    monkeypatch: pytest.MonkeyPatch, prefix: str, arguments: str, said: bool
) -> None:
    monkeypatch.setattr(sys, "base_prefix", prefix)
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: arguments)
    found = doctor._python()
    assert found.status == "ok"
    assert ("built without optimisation" in found.message) is said
