"""From settings to a store: the adapters of a runner, with those in it that the engine is started with."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from engine.adapters.low_rank import AdapterWeights
from engine.adapters.peft import find_folder
from engine.adapters.store import AdapterStore
from engine.config import AdapterEntry, EngineConfig
from engine.runner import ModelRunner
from engine.warm_up import probe


def open_adapters(config: EngineConfig, runner: ModelRunner) -> AdapterStore[AdapterWeights]:
    """The store of a runner's adapters. Raises ModelFileError where one that the settings name cannot be used."""
    root = None if config.lora_dir is None else Path(config.lora_dir)

    def load(entry: AdapterEntry) -> AdapterWeights:
        folder = find_folder(entry.path, root if entry.bounded else None)
        return runner.load_adapter(folder, most_rank=config.max_lora_rank)

    try_out = partial(probe, runner)
    store = AdapterStore(runner.adapters.loaded, load, try_out, config.max_loras, spare=config.lora_dir is not None)
    for entry in config.adapters:
        store.load_now(entry)
    return store
