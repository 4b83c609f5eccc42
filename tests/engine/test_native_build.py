"""How the CPU kernels are compiled: once, kept, by several at once, again where need be; everything works without."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import platform
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.layers import native
from engine.layers.device import build_ops
from engine.layers.ops_cpu import NativeOps
from engine.layers.ops_torch import TorchOps

CPU = torch.device("cpu")


def assert_it_computes(library: ctypes.CDLL) -> None:
    x, w = torch.arange(192, dtype=torch.float32).view(3, 64), torch.linspace(-1, 1, 64)
    torch.testing.assert_close(NativeOps(library).rms_norm(x, w, 1e-5), TorchOps().rms_norm(x, w, 1e-5))


def test_the_library_is_built_once_and_kept_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERLINE_CACHE_DIR", str(tmp_path))
    native.build(("-O0",))
    (built,) = (tmp_path / "tierline" / "native").glob("*.so")
    stamp = built.stat().st_mtime_ns
    native.build(("-O0",))
    assert built.stat().st_mtime_ns == stamp
    assert (tmp_path / "tierline" / "native").stat().st_mode & 0o077 == 0
    (tmp_path / "tierline" / "native").chmod(0o777)
    with pytest.raises(native.NativeBuildError, match="TIERLINE_CACHE_DIR"):
        native.build(("-O0",))


def test_kernels_are_those_that_the_module_was_loaded_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package replaced under a running process: its Python must not meet kernels that take other arguments."""
    monkeypatch.setenv("TIERLINE_CACHE_DIR", str(tmp_path / "cache"))
    source = Path(native.__file__)
    shutil.copytree(source.parent.parent / "kernels", tmp_path / "kernels")
    (tmp_path / "layers").mkdir()
    shutil.copy(source, tmp_path / "layers")
    spec = importlib.util.spec_from_file_location("copied_native", tmp_path / "layers" / source.name)
    assert spec is not None
    assert spec.loader is not None
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    for file in (tmp_path / "kernels").glob("*.[ch]"):
        file.write_text("#error another version")
    assert_it_computes(copied.build(("-O0",)))
    shutil.rmtree(tmp_path / "kernels")
    incomplete = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(incomplete)
    with pytest.raises(incomplete.NativeBuildError, match="installation is incomplete"):
        incomplete.build()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64 compilers")
def test_the_code_for_wider_vectors_compiles_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte products of 512 bits: built and loaded, also where the processor cannot run them."""
    monkeypatch.setenv("TIERLINE_CACHE_DIR", str(tmp_path))
    assert native.build(("-O1", "-march=icelake-server"))


def test_without_a_compiler_everything_still_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TIERLINE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("TIERLINE_NATIVE", raising=False)
    uncached = native.library.__wrapped__
    with caplog.at_level(logging.WARNING):
        assert uncached() is None
    assert "no C compiler found" in caplog.text
    monkeypatch.setattr(native, "library", uncached)
    assert type(build_ops(CPU)) is TorchOps


def test_a_compiler_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERLINE_CACHE_DIR", str(tmp_path))
    with pytest.raises(native.NativeBuildError, match="no-such-flag"):
        native.build(("-fno-such-flag-exists",))
    assert not list((tmp_path / "tierline" / "native").iterdir())


def test_two_that_build_at_once_both_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERLINE_CACHE_DIR", str(tmp_path))
    together = threading.Barrier(2)

    def compile_together(compiler: str, flags: tuple[str, ...], target: Path) -> None:
        together.wait(60)  # both have seen that there is none
        compile_kernels(compiler, flags, target)

    compile_kernels = native._compile
    monkeypatch.setattr(native, "_compile", compile_together)
    with ThreadPoolExecutor(2) as engines:
        builds = list(engines.map(native.build, [("-O0",)] * 2))
    for built in builds:
        assert_it_computes(built)
    (left,) = (tmp_path / "tierline" / "native").iterdir()
    assert left.suffix == ".so"


@pytest.mark.parametrize("kept", [b"", b"\x7fELF and no more"])
def test_a_library_that_was_kept_in_part_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept: bytes
) -> None:
    """As after a power cut: the name was on the disk, its contents were not."""
    monkeypatch.setenv("TIERLINE_CACHE_DIR", str(tmp_path))

    def compile_in_part(_compiler: str, _flags: tuple[str, ...], target: Path) -> None:
        target.write_bytes(kept)

    with monkeypatch.context() as patched:
        patched.setattr(native, "_compile", compile_in_part)
        with pytest.raises(OSError):
            native.build(("-O0",))
    assert_it_computes(native.build(("-O0",)))
    assert "compiled again" in caplog.text


def test_without_a_place_to_keep_them_everything_still_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TIERLINE_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.delenv("TIERLINE_NATIVE", raising=False)
    with caplog.at_level(logging.WARNING):
        assert native.library.__wrapped__() is None
    assert "decoding will be slower" in caplog.text
    assert "set TIERLINE_CACHE_DIR" in caplog.text


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cache_dir", lambda: tmp_path / "gone")
    with pytest.raises(native.NativeBuildError, match=r"gone cannot be written: .*: set TIERLINE_CACHE_DIR"):
        native.build(("-O0",))


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERLINE_NATIVE", "0")
    assert native.library.__wrapped__() is None
