"""Fetches one file over HTTP(S) or from a file URL: resumable, checksummed, with progress.

Bytes go to a `.part` file that survives an interruption; the next call continues with a range request. The target
appears by an atomic rename, and only with the right SHA-256.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

import httpx

from gateway.models.errors import ModelError
from gateway.models.index import PipNetwork

# Called with the bytes that are there and the total, or None while it is unknown.
Progress = Callable[[int, int | None], None]

_ATTEMPTS = 5
_CHUNK_BYTES = 1 << 20
_TIMEOUT = httpx.Timeout(30.0, read=60.0)


class Refused(ModelError):
    """The server answered with a status that no retry changes; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def fetch(
    url: str, target: Path, *, sha256: str, network: PipNetwork, progress: Progress, retry_delay_s: float = 1.0
) -> None:
    """Download `url` to `target`, continuing `target.part` if an earlier call left one.

    Lost connections are retried, each time from the byte where the last one ended.

    Raises:
        ModelError: unreachable, refused, disk full, or the content has another checksum than `sha256`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    parts = urlsplit(url)
    resumed = part.exists() and part.stat().st_size > 0
    with _disk_errors(target):
        if parts.scheme == "file":
            _copy(Path(url2pathname(unquote(parts.path))), part, progress)
        else:
            with _client(network) as client:
                _fetch_with_retries(client, url, part, progress, retry_delay_s)
                if resumed and digest(part) != sha256:
                    # What an earlier call left may be of another file: once more, from the first byte.
                    part.unlink()
                    _fetch_with_retries(client, url, part, progress, retry_delay_s)
        found = digest(part)
        if found != sha256:
            part.unlink()
            raise ModelError(
                f"checksum mismatch for {_safe(url)}: expected SHA-256 {sha256}, got {found}. "
                "The download was thrown away; try again, and if it repeats, check the mirror or proxy in between."
            )
        os.replace(part, target)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def ssl_context(network: PipNetwork) -> ssl.SSLContext:
    """Certificates: pip's `cert`, else SSL_CERT_FILE, REQUESTS_CA_BUNDLE or CURL_CA_BUNDLE, else system and certifi.

    Raises:
        ModelError: the configured bundle cannot be read.
    """
    variables = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
    bundle = network.cert or next((os.environ[name] for name in variables if os.environ.get(name)), None)
    if bundle is None:
        context = httpx.create_ssl_context(trust_env=False)
        context.load_default_certs()
        return context
    try:
        if Path(bundle).is_dir():
            return ssl.create_default_context(capath=bundle)
        return ssl.create_default_context(cafile=bundle)
    except (OSError, ssl.SSLError) as error:
        raise ModelError(
            f"cannot read the certificate bundle {bundle}: {error}. See `pip config get global.cert`."
        ) from error


def _client(network: PipNetwork) -> httpx.Client:
    return httpx.Client(
        verify=ssl_context(network),
        proxy=network.proxy,
        timeout=_TIMEOUT,
        follow_redirects=True,
        # A compressed transfer could not be continued by byte position.
        headers={"accept-encoding": "identity", "user-agent": "tierline"},
    )


def _fetch_with_retries(client: httpx.Client, url: str, part: Path, progress: Progress, delay_s: float) -> None:
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _fetch_once(client, url, part, progress)
            return
        except httpx.TransportError as error:
            after = part.stat().st_size if part.exists() else 0
            failures = 1 if after > before else failures + 1
            if failures >= _ATTEMPTS or _is_certificate_error(error):
                raise ModelError(_unreachable(url, error, after)) from error
            time.sleep(delay_s * 2 ** (failures - 1))
        except httpx.InvalidURL as error:
            raise ModelError(f"{_safe(url)} is not a usable address: {error}.") from error


def _fetch_once(client: httpx.Client, url: str, part: Path, progress: Progress) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"range": f"bytes={have}-"} if have else {}
    with client.stream("GET", url, headers=headers) as response:
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            if _total_of(response) == have:
                return
            part.unlink()
            raise httpx.ReadError("the partial file is longer than the file on the server")
        if response.status_code >= 500 or response.status_code == httpx.codes.TOO_MANY_REQUESTS:
            raise httpx.ReadError(f"the server answered {response.status_code}")
        if response.status_code not in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
            raise Refused(f"{_safe(url)}: the server answered {response.status_code}.", response.status_code)
        continues = response.status_code == httpx.codes.PARTIAL_CONTENT and _start_of(response) == have
        if response.status_code == httpx.codes.PARTIAL_CONTENT and not continues:
            part.unlink()
            raise httpx.ReadError("the server sent another range than the one asked for")
        if not continues:
            have = 0
        length = response.headers.get("content-length")
        total = have + int(length) if length and length.isdigit() else None
        _check_space(part, (total or 0) - have)
        with part.open("ab" if continues else "wb") as file:
            progress(have, total)
            # Unchunked, so that a cut connection loses nothing of what had arrived.
            for chunk in response.iter_raw():
                file.write(chunk)
                have += len(chunk)
                progress(have, total)
        if total is not None and have != total:
            raise httpx.ReadError(f"the connection ended after {have} of {total} bytes")


def _copy(source: Path, part: Path, progress: Progress) -> None:
    try:
        total = source.stat().st_size
        with source.open("rb") as reader, part.open("wb") as writer:
            done = 0
            while chunk := reader.read(_CHUNK_BYTES):
                writer.write(chunk)
                done += len(chunk)
                progress(done, total)
    except FileNotFoundError as error:
        raise ModelError(f"the index points to {source}, which does not exist.") from error


def _check_space(path: Path, needed_bytes: int) -> None:
    stat = os.statvfs(path.parent)
    free_bytes = stat.f_bavail * stat.f_frsize
    if needed_bytes > free_bytes:
        raise OSError(errno.ENOSPC, f"{needed_bytes:,} bytes are needed, {free_bytes:,} are free")


@contextlib.contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(
                f"the disk of {target.parent} is full ({error.strerror}): free some space and run the same command; "
                "it continues where it stopped."
            ) from error
        raise ModelError(f"cannot write {target}: {error}.") from error


def _total_of(response: httpx.Response) -> int | None:
    total = response.headers.get("content-range", "").rpartition("/")[2]
    return int(total) if total.isdigit() else None


def _start_of(response: httpx.Response) -> int | None:
    start = response.headers.get("content-range", "").removeprefix("bytes ").partition("-")[0]
    return int(start) if start.isdigit() else None


def _is_certificate_error(error: httpx.TransportError) -> bool:
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


def _unreachable(url: str, error: httpx.TransportError, have: int) -> str:
    what = f"cannot download {_safe(url)}: {error}."
    if _is_certificate_error(error):
        return f"{what} Name your certificate bundle with `pip config set global.cert FILE` or SSL_CERT_FILE."
    kept = f" {have:,} bytes are kept, the same command continues from there." if have else ""
    return f"{what} Check network and proxy (HTTPS_PROXY).{kept}"


def _safe(url: str) -> str:
    """The URL without user, password and query, for messages."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{parts.scheme}://{host}{parts.path}"
