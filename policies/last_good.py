"""The last good set of policies on disk, so that a start finds it where the policy folder does not load.

The folder holds one folder per content, named by its hash, and a link `now` to the one that counts: it turns in one
step, so that a process killed at any moment leaves a whole set. Several processes may write: one at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from policies.policyset import PolicySet

_NOW: Final = "now"


def place(folder: Path) -> Path:
    """Where the files of the last good set lie: a folder of policies, if anything was kept."""
    return folder / _NOW


def keep(folder: Path, policies: PolicySet) -> None:
    """Have these policies, as they were read, as the last good set; nothing is written where they are it already.

    Raises:
        OSError: they could not be written; what was kept before still is.
    """
    texts = {Path(policy.file).name: policy.text.encode() for policy in policies.written}
    name = _hash(texts)
    if _is_kept(folder, name, texts):
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(folder):
        for left in folder.glob(".new-*"):  # by a process that was killed
            shutil.rmtree(left)
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
        try:
            _write(new / name, texts)
            (new / _NOW).symlink_to(name)
            if (folder / name).exists():  # kept before, and damaged or not turned to
                (folder / name).rename(new / "old")
            (new / name).rename(folder / name)
            if (folder / _NOW).is_dir() and not (folder / _NOW).is_symlink():  # restored from a copy without links
                (folder / _NOW).rename(new / "copy")
            (new / _NOW).replace(folder / _NOW)
            _sync(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        for other in folder.iterdir():
            if other.name not in (name, _NOW) and other.is_dir():
                shutil.rmtree(other, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else writes or reads meanwhile. The kernel lets go of the lock however its holder ends."""
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _is_kept(folder: Path, name: str, texts: dict[str, bytes]) -> bool:
    try:
        if os.readlink(folder / _NOW) != name:
            return False
        return {path.name: path.read_bytes() for path in (folder / name).iterdir()} == texts
    except OSError:
        return False


def _write(folder: Path, texts: dict[str, bytes]) -> None:
    folder.mkdir(mode=0o700)
    for name, text in texts.items():
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(handle, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    _sync(folder)


def _sync(folder: Path) -> None:
    """Have the names in a folder on disk, not only the contents of its files."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hash(texts: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, text in sorted(texts.items()):
        digest.update(os.fsencode(name) + f"\0{len(text)}\0".encode())
        digest.update(text)
    return digest.hexdigest()[:16]
