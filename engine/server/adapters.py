"""Loading and unloading adapters over HTTP, as vLLM names it: for whoever runs the engine, not for its clients.

It is off unless `--lora-dir` names the folder that adapters may come from, and nothing outside that folder is read.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from backends.protocol import InvalidRequest, Json
from engine.adapters.registry import AdapterRefused, AdapterRegistry, ServedAdapter
from engine.client import EngineClient
from engine.server.errors import ApiError
from engine.server.schema import decode_object
from engine.text.answer import AdapterMissing, EngineDown

_MOST_NAME = 128
# Letters and marks that show nothing: fillers, joiners, vowels without a sound, blank patterns, selectors of variants.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


class LoadRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /v1/load_lora_adapter`. `load_inplace`: another adapter may have the name; it is replaced."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str


class AdapterAdmin:
    """What the two routes do with a body."""

    def __init__(self, model_name: str, client: EngineClient) -> None:
        self._model_name = model_name
        self._client = client

    async def load(self, raw: bytes) -> Json:
        """Serve an adapter. Raises what `as_api_error` knows."""
        adapters = self._adapters()
        asked = msgspec.convert(decode_object(raw), LoadRequest)
        check_adapter_name(asked.lora_name, self._model_name)
        try:
            adapter = await adapters.load(asked.lora_name, asked.lora_path, replace=asked.load_inplace)
        except AdapterRefused as error:
            raise ApiError(400, str(error), code="adapter_refused", param="lora_path") from error
        return adapter_card(adapter)

    async def unload(self, raw: bytes) -> Json:
        """Serve an adapter no more; the answer comes when it is gone. Raises what `as_api_error` knows."""
        adapters = self._adapters()
        asked = msgspec.convert(decode_object(raw), UnloadRequest)
        try:
            await adapters.unload(asked.lora_name)
        except AdapterMissing as error:
            raise ApiError(404, str(error), code="adapter_not_found", param="lora_name") from error
        return {"id": asked.lora_name, "unloaded": True}

    def _adapters(self) -> AdapterRegistry:
        if self._client.config.lora_dir is None:
            raise ApiError(
                403,
                "This engine loads no adapters while it runs: it was started without '--lora-dir'.",
                type="permission_error",
                code="adapters_disabled",
            )
        if self._client.ready is None:
            raise EngineDown("The model is not loaded. Try again in a few seconds.")
        return self._client.adapters


def adapter_card(adapter: ServedAdapter) -> dict[str, Any]:
    """What is told of an adapter. `digest` is the beginning of its content's."""
    return {
        "id": adapter.name,
        "rank": adapter.rank,
        "bytes": adapter.num_bytes,
        "digest": adapter.entry.digest[:16],
    }


def check_adapter_name(name: str, model_name: str) -> None:
    """Raises InvalidRequest for a name that no adapter can have."""
    # What is not printable: white space but the blank, controls, marks of direction, joiners, halves of surrogates.
    if not 1 <= len(name) <= _MOST_NAME or " " in name or not name.isprintable() or _UNSEEN.search(name):
        text = f"A name has 1 to {_MOST_NAME} characters, no white space and none that cannot be seen."
        raise InvalidRequest(text, param="lora_name")
    if name == model_name:
        raise InvalidRequest(f"'{name[:128]}' is the name of the model itself.", param="lora_name")
