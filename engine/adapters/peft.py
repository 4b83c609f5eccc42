"""An adapter's folder as PEFT writes it, read as a whole: `adapter_config.json` and `adapter_model.safetensors`.

Every tensor is looked at: it must have a place in the model, its partner, the right shape and finite values. What is
read is copied, so that the files may change or go while the adapter is served. numpy only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.adapters.config import AdapterConfig, read_config
from engine.adapters.targets import Target, targets_of
from engine.loader.errors import ModelFileError
from engine.loader.folder import Folder
from engine.loader.safetensors import Safetensors
from engine.models.spec import ModelSpec
from engine.models.tensors import FloatArray

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
# Below these names a folder's tensors lie, too; the last is that of a model that was trained without its head.
_LAYER = re.compile(
    r"(?:model\.|model\.language_model\.|language_model\.model\.|)layers\.(?P<layer>\d{1,6})\.(?P<name>.+)"
)
_COPY_AGAIN = "The adapter is incomplete or damaged: copy it again"


@dataclass(frozen=True, slots=True)
class Pair:
    """What is added to a module's output: `x down^T up^T`. down: `[rank, columns]`; up: `[rows, rank]`, scaled."""

    target: Target
    down: FloatArray
    up: FloatArray


@dataclass(frozen=True, slots=True)
class Adapter:
    """All pairs of an adapter by layer. `digest`: of what it computes, so that equal adapters have the same one."""

    layers: Mapping[int, list[Pair]]
    rank: int  # the largest of all modules
    digest: bytes


def find_folder(path: str, root: Path | None) -> Path:
    """The folder of an adapter, without symbolic links. `root`: it, and the files in it, must lie below this folder,
    which relative paths begin at; None: anywhere.

    Raises ModelFileError where there is no complete adapter, or not below `root`.
    """
    base = Path() if root is None else root.resolve()
    try:
        folder = (base / path).resolve(strict=True)
        files = [(folder / name).resolve() for name in (CONFIG_FILE, WEIGHTS_FILE)]
    except (OSError, ValueError, RuntimeError) as error:  # missing, a name with a null byte, a circle of links
        if root is not None and not _is_below((base / path.replace("\0", "")).absolute(), base):
            raise _outside(path) from error
        raise ModelFileError(path, "no such folder", "Give the folder of a PEFT adapter") from error
    if root is not None and not all(_is_below(found, base) for found in (folder, *files)):
        raise _outside(path)
    for name, file in zip((CONFIG_FILE, WEIGHTS_FILE), files, strict=True):
        if not file.is_file():
            remedy = "Save the adapter with safetensors" if name == WEIGHTS_FILE else "Give the folder of an adapter"
            raise ModelFileError(path, f"has no file {name}", remedy)
    return folder


def _is_below(path: Path, base: Path) -> bool:
    return path != base and path.is_relative_to(base) and ".." not in path.parts


def _outside(path: str) -> ModelFileError:
    return ModelFileError(path, "lies outside the folder of adapters", "Only what lies below '--lora-dir' is loaded")


def read_adapter(folder: Path, spec: ModelSpec, *, most_rank: int) -> Adapter:
    """The adapter in `folder` for the model `spec`.

    Raises ModelFileError for one that is damaged, incomplete, of another model or of another kind, or that has a rank
    above `most_rank`.
    """
    small = Folder(folder)
    config_path = folder / CONFIG_FILE
    config = read_config(config_path, small.parse(CONFIG_FILE, small.need(CONFIG_FILE, "what the adapter changes")))
    if (rank := max([config.rank, *config.ranks.values()])) > most_rank:
        raise ModelFileError(
            config_path, f"rank {rank} is above {most_rank}", "Start the engine with '--max-lora-rank'"
        )
    reader = _Reader(Safetensors(folder / WEIGHTS_FILE), config, spec)
    layers = reader.layers()
    return Adapter(layers, rank, _digest(layers))


class _Reader:
    def __init__(self, files: Safetensors, config: AdapterConfig, spec: ModelSpec) -> None:
        self._files = files
        self._config = config
        self._targets = [targets_of(spec, layer) for layer in spec.layers]

    def fault(self, problem: str, remedy: str = _COPY_AGAIN) -> ModelFileError:
        return ModelFileError(self._files.path, problem, remedy)

    def layers(self) -> dict[int, list[Pair]]:
        """All pairs, in the order of their places in the model."""
        found = self._modules()
        layers: dict[int, list[Pair]] = {}
        for index, targets in enumerate(self._targets):
            for name, target in targets.items():
                module = found.pop((index, name), None)
                if module is not None:
                    layers.setdefault(index, []).append(self._pair(module, target))
                elif self._config.must_change(index, f"model.layers.{index}.{name}"):
                    raise self.fault(f"layer {index} has no matrices for {name}, which {CONFIG_FILE} names")
        if not layers:
            raise self.fault("has no tensors")
        return layers

    def _modules(self) -> dict[tuple[int, str], str]:
        """The modules that have tensors, each with its full name; every tensor belongs to one that is in the model."""
        modules: dict[tuple[int, str], str] = {}
        for tensor in self._files.tensors:
            match = _TENSOR.fullmatch(tensor)
            place = None if match is None else _LAYER.fullmatch(match["module"])
            if match is None or place is None:
                raise self.fault(f"tensor {tensor!r:.200} is none of a layer's LoRA matrices", self._advice())
            layer, name = int(place["layer"]), place["name"]
            if layer >= len(self._targets) or name not in self._targets[layer]:
                raise self.fault(f"tensor {tensor!r:.200} changes what the model does not have", self._advice())
            if modules.setdefault((layer, name), match["module"]) != match["module"]:
                raise self.fault(f"{name} of layer {layer} has matrices under two names")
        return modules

    def _advice(self) -> str:
        names = ", ".join(dict.fromkeys(name for targets in self._targets for name in targets))
        return f"An adapter can change these modules of this model: {names}"

    def _pair(self, module: str, target: Target) -> Pair:
        rank = self._config.rank_of(module)
        down = self._values(module, "A", (rank, target.columns))
        up = self._values(module, "B", (target.rows, rank))
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = up * np.float32(self._config.scale_of(module))
        if not np.isfinite(scaled).all():
            raise self.fault(f"{module} is not finite any more once it is scaled by lora_alpha and rank")
        return Pair(target, down, scaled)

    def _values(self, module: str, half: str, shape: tuple[int, int]) -> FloatArray:
        name = f"base_model.model.{module}.lora_{half}.weight"
        if name not in self._files.tensors:
            raise self.fault(f"tensor {name!r} is missing")
        if (stored := self._files.info(name).shape) != shape:
            raise self.fault(
                f"tensor {name!r} has shape {list(stored)}, the model and {CONFIG_FILE} ask for {list(shape)}",
                "Use an adapter that was trained on this very model",
            )
        values = np.array(self._files.tensor(name).dequantize())
        if not np.isfinite(values).all():
            raise self.fault(f"tensor {name!r} has values that are not finite")
        return values


def _digest(layers: Mapping[int, list[Pair]]) -> bytes:
    """32 bytes of every value and its place. Names of files and folders have no part in it."""
    digest = hashlib.blake2b(digest_size=32)
    for index, pairs in layers.items():
        for pair in pairs:
            digest.update(f"{index} {pair.target} {pair.down.shape} ".encode())
            digest.update(pair.down.tobytes())
            digest.update(pair.up.tobytes())
    return digest.digest()
