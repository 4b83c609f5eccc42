"""What `tierline doctor` takes for a C compiler is what the engine would compile with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine.layers import native
from gateway import doctor


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
