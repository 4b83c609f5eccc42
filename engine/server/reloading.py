"""`POST /v1/reload_weights`: other weights for the model that is served, for whoever runs the engine, not for clients.

It is off unless `--reload-dir` names the folder that weights may come from, and nothing outside that folder is read.
The new weights must belong to the same tokenizer, templates and task: what waits is tokenized already, and answers are
written as the old ones would be. Anything else is a new model, and a new engine.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from backends.protocol import Json
from engine.client import EngineClient
from engine.exchange import ReloadFailed
from engine.loader import ModelFileError, read_info
from engine.server.errors import ApiError
from engine.server.model import Model, fingerprint
from engine.server.schema import decode_object


class ReloadRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`path`: a GGUF file or a Hugging Face folder, below the folder that the engine was started with."""

    path: str


class WeightsAdmin:
    """What the route does with a body."""

    def __init__(self, model: Model, client: EngineClient) -> None:
        self._model = model
        self._client = client

    async def reload(self, raw: bytes) -> Json:
        """Exchange the weights; the answer comes when the new ones serve. Raises what `as_api_error` knows."""
        root = self._client.config.reload_dir
        if root is None:
            raise ApiError(
                403,
                "This engine exchanges no weights while it runs: it was started without '--reload-dir'.",
                type="permission_error",
                code="reload_disabled",
            )
        asked = msgspec.convert(decode_object(raw), ReloadRequest)
        try:
            path = find_weights(asked.path, Path(root))
            info = await asyncio.to_thread(read_info, path)
            if fingerprint(info) != self._model.fingerprint:
                raise ModelFileError(
                    path, "another tokenizer, chat template, vocabulary or kind of model", "Start an engine with it"
                )
            ready = await self._client.reload(str(path))
        except (ModelFileError, ReloadFailed) as error:
            raise ApiError(400, str(error), code="reload_failed", param="path") from error
        return {"model": self._model.name, "digest": ready.model_digest, "load_seconds": ready.load_seconds}


def find_weights(path: str, root: Path) -> Path:
    """What `path` means below the folder `root`, without symbolic links.

    Raises:
        ModelFileError: nothing is there, it lies outside, or there is something that is neither file nor folder.
    """
    base = root.resolve()
    try:
        found = (base / path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:  # missing, a null byte in the name, a circle of links
        raise ModelFileError(Path(path.replace("\0", "")), "no such file or folder", "Give a path below it") from error
    inside = [found, *(entry.resolve() for entry in found.iterdir())] if found.is_dir() else [found]
    if not all(base in entry.parents for entry in inside):
        raise ModelFileError(Path(path), "lies outside the folder that weights may come from", "Give a path below it")
    # Who opens a pipe waits for its writer for ever.
    if any(entry.exists() and not (entry.is_file() or entry.is_dir()) for entry in inside):
        raise ModelFileError(Path(path), "a pipe, a socket or a device is there", "Give a file or a folder of files")
    return found
