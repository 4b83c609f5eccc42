"""A digest of a model's weights that takes no longer for a hundred gigabytes than for one.

It tells models apart whose cached pages must not be mixed: another model, another quantisation of it, another training
of the same architecture, an exchanged tensor. Read are the sizes and headers of all files and three samples of every
tensor. Against someone who changes single values between the samples it protects nobody: compare checksums for that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

_SAMPLE_BYTES = 4096


def content_digest(headers: Iterable[bytes], extents: Iterable[tuple[Path, int, int]]) -> bytes:
    """16 bytes of `headers`, taken whole, and of samples from `extents`: file, offset and length of each tensor.

    Names and dates of files have no part in it, so copies of a model have one digest wherever they lie.
    """
    digest = hashlib.blake2b(digest_size=16)
    for header in headers:
        digest.update(len(header).to_bytes(8, "little"))
        digest.update(header)
    by_file: dict[Path, list[tuple[int, int]]] = {}
    for path, offset, length in extents:
        by_file.setdefault(path, []).append((offset, length))
    for path in sorted(by_file):
        with path.open("rb", buffering=0) as file:
            for offset, length in sorted(by_file[path]):
                digest.update(length.to_bytes(8, "little"))
                last = max(0, length - _SAMPLE_BYTES)
                for start in sorted({0, last // 2, last}):
                    file.seek(offset + start)
                    digest.update(file.read(min(_SAMPLE_BYTES, length - start)))
    return digest.digest()
