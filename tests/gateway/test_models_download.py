"""The download of a model's file, from a file server with faults, and what pip is asked for it."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.models import index
from gateway.models.download import fetch
from gateway.models.errors import ModelError
from gateway.models.index import PipNetwork
from tests.gateway.package_site import WEIGHTS, Site, fetch_quickly, no_progress, served


@pytest.fixture
def site() -> Iterator[Site]:
    with served() as running:
        yield running


def test_a_cut_connection_is_continued_with_a_range(site: Site, tmp_path: Path) -> None:
    site.files["/a.whl"] = WEIGHTS
    site.cut_after = [1_200_000, 500_000]
    fetch_quickly(f"{site.url}/a.whl", tmp_path / "a.whl", hashlib.sha256(WEIGHTS).hexdigest())
    assert (tmp_path / "a.whl").read_bytes() == WEIGHTS
    spans = site.downloads()
    assert spans[0] is None
    assert [int(re.sub(r"\D", "", span or "")) for span in spans[1:]] == [1_200_000, 1_700_000]


def test_a_server_without_ranges_starts_over(site: Site, tmp_path: Path) -> None:
    site.files["/a.whl"] = WEIGHTS
    site.cut_after = [1_200_000]
    site.ignore_ranges = True
    fetch_quickly(f"{site.url}/a.whl", tmp_path / "a.whl", hashlib.sha256(WEIGHTS).hexdigest())
    assert (tmp_path / "a.whl").read_bytes() == WEIGHTS


@pytest.mark.parametrize("leftover", [WEIGHTS, WEIGHTS + b"too long", b"another file" * 1000])
def test_a_leftover_is_used_only_if_it_fits(leftover: bytes, site: Site, tmp_path: Path) -> None:
    site.files["/a.whl"] = WEIGHTS
    (tmp_path / "a.whl.part").write_bytes(leftover)
    fetch_quickly(f"{site.url}/a.whl", tmp_path / "a.whl", hashlib.sha256(WEIGHTS).hexdigest())
    assert (tmp_path / "a.whl").read_bytes() == WEIGHTS
    assert not (tmp_path / "a.whl.part").exists()


def test_a_wrong_checksum_leaves_no_file(site: Site, tmp_path: Path) -> None:
    site.files["/a.whl"] = WEIGHTS
    with pytest.raises(ModelError, match=f"checksum mismatch.*expected SHA-256 {'0' * 64}"):
        fetch_quickly(f"{site.url}/a.whl", tmp_path / "a.whl", "0" * 64)
    assert list(tmp_path.iterdir()) == []


def test_a_passing_server_error_is_retried_and_a_final_one_is_not(site: Site, tmp_path: Path) -> None:
    site.files["/a.whl"] = WEIGHTS
    site.statuses = [503, 429]
    fetch_quickly(f"{site.url}/a.whl", tmp_path / "a.whl", hashlib.sha256(WEIGHTS).hexdigest())
    assert len(site.downloads()) == 3
    with pytest.raises(ModelError, match="answered 404"):
        fetch_quickly(f"{site.url}/b.whl", tmp_path / "b.whl", "0" * 64)
    assert len(site.downloads()) == 4


def test_giving_up_keeps_what_is_there_and_says_so(site: Site, tmp_path: Path) -> None:
    site.files["/a.whl"] = WEIGHTS
    site.cut_after = [1_000_000] + [0] * 10
    with pytest.raises(ModelError, match="1,000,000 bytes are kept"):
        fetch_quickly(f"{site.url}/a.whl", tmp_path / "a.whl", hashlib.sha256(WEIGHTS).hexdigest())
    site.cut_after = []
    fetch_quickly(f"{site.url}/a.whl", tmp_path / "a.whl", hashlib.sha256(WEIGHTS).hexdigest())


def test_a_full_disk_says_so(site: Site, tmp_path: Path) -> None:
    """Writing to /dev/full fails as a full disk does."""
    site.files["/a.whl"] = WEIGHTS
    (tmp_path / "a.whl.part").symlink_to("/dev/full")
    with pytest.raises(ModelError, match=r"disk of .* is full"):
        fetch_quickly(f"{site.url}/a.whl", tmp_path / "a.whl", "0" * 64)


def test_messages_never_show_credentials(site: Site, tmp_path: Path) -> None:
    url = site.url.replace("http://", "http://user:secret@") + "/missing.whl?token=secret"
    with pytest.raises(ModelError) as caught:
        fetch_quickly(url, tmp_path / "a.whl", "0" * 64)
    assert "secret" not in str(caught.value)


# --- pip's configuration ---


def test_the_environment_wins_over_pips_files() -> None:
    listing = "global.cert='/a.pem'\nglobal.proxy='http://proxy:1'\n:env:.cert='/b.pem'\ninstall.cert='/c.pem'\nnoise\n"
    assert index.parse_config(listing) == PipNetwork(cert="/b.pem", proxy="http://proxy:1")
    assert index.parse_config("") == PipNetwork()


def test_an_unreadable_certificate_bundle_is_named(site: Site, tmp_path: Path) -> None:
    network = PipNetwork(cert=str(tmp_path / "missing.pem"))
    with pytest.raises(ModelError, match=r"missing\.pem"):
        fetch(f"{site.url}/a.whl", tmp_path / "a.whl", sha256="0" * 64, network=network, progress=no_progress)


def test_the_real_pip_reports_its_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_CERT", str(tmp_path / "bundle.pem"))
    assert index.pip_network().cert == str(tmp_path / "bundle.pem")


def test_a_python_without_pip_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    no_pip = (sys.executable, "-S", "-m", "pip")
    assert subprocess.run([*no_pip], capture_output=True, check=False).returncode != 0
    monkeypatch.setattr(index, "_PIP", no_pip)
    with pytest.raises(ModelError, match="ensurepip"):
        index.resolve("anything==1.0")
