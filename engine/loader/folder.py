"""The small files of a Hugging Face folder: read when asked for, missing and damaged ones named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.loader.errors import ModelFileError

_LFS_POINTER = "version https://git-lfs.github.com/"


class Folder:
    """A folder with a model in it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def text(self, name: str) -> str | None:
        """The file `name`, None where there is none. Raises ModelFileError for one that cannot be read."""
        try:
            text = (self.path / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(
                self.path / name, f"cannot be read ({error})", "Check the file and its permissions, or copy it anew"
            ) from error
        if text.startswith(_LFS_POINTER):
            raise ModelFileError(self.path / name, "is a Git LFS pointer, not the file", "Fetch it with `git lfs pull`")
        return text

    def json(self, name: str) -> dict[str, Any]:
        """The JSON object in the file `name`, empty where there is no such file.

        Raises ModelFileError for a file that is no JSON object, a copy broken off for one.
        """
        text = self.text(name)
        return {} if text is None else self.parse(name, text)

    def parse(self, name: str, text: str) -> dict[str, Any]:
        """The JSON object that `text`, read from the file `name`, holds. Raises ModelFileError as `json`."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ModelFileError(
                self.path / name, f"its JSON is damaged ({error})", "The copy is incomplete: copy it anew"
            ) from error
        if not isinstance(content, dict):
            raise ModelFileError(self.path / name, "its JSON is no object", "Copy it anew")
        return content

    def need(self, name: str, what: str) -> str:
        """The file `name`, which holds `what`. Raises ModelFileError where it is missing."""
        text = self.text(name)
        if text is None:
            raise ModelFileError(
                self.path / name, f"no such file, and {what} is in it", "The folder is incomplete: copy all its files"
            )
        return text
