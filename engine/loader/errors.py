"""The one error a model file can cause: which file, what is wrong with it, what to do."""

from __future__ import annotations

from pathlib import Path


class ModelFileError(Exception):
    """A model file that cannot be used. The message names the file, the fault and the remedy."""

    def __init__(self, path: Path | str, problem: str, remedy: str) -> None:
        self.path = Path(path)
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{self.path}: {problem}. {remedy}")
