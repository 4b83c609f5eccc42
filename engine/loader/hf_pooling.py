"""What a Hugging Face folder says of pooling: the head in `config.json`, and Sentence Transformers' `modules.json`.

modules.json           the chain: transformer, pooling, normalisation; anything else is refused
1_Pooling/config.json  which tokens' states are taken (the folder's name stands in modules.json)
config.json            a sequence classifier with one label: a score for a text or a pair of texts
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from engine.loader.errors import ModelFileError
from engine.loader.folder import Folder
from engine.models.pooling import PoolingKind, PoolingSpec

CLASSIFIER = "ForSequenceClassification"
BARE = "Model"  # the blocks alone, without an output matrix
_MODULES = "modules.json"
# Older files have one flag per kind, newer ones its name.
_FLAGS = {
    "pooling_mode_lasttoken": PoolingKind.LAST,
    "pooling_mode_mean_tokens": PoolingKind.MEAN,
    "pooling_mode_cls_token": PoolingKind.CLS,
}
_NAMES = {"lasttoken": PoolingKind.LAST, "mean": PoolingKind.MEAN, "cls": PoolingKind.CLS}
_ADVICE = "Use a model that pools by last token, mean or first token"


def read_pooling(folder: Folder, config: Mapping[str, Any]) -> PoolingSpec | None:
    """How the folder's model pools, `config` its parsed config.json; None: it is made to generate.

    Raises ModelFileError for files that are damaged, or ask for what is not supported.
    """
    name = config["architectures"][0]
    if name.endswith(CLASSIFIER):
        labels = len(config.get("id2label") or ()) or config.get("num_labels", 2)
        if labels != 1:
            raise ModelFileError(
                folder.path / "config.json", f"a classifier with {labels} labels", "Use one with a single score"
            )
        return PoolingSpec(normalise=False, labels=1, sigmoid=not _plain_score(folder, config))
    if (text := folder.text(_MODULES)) is not None:
        return _chain(folder, text)
    return PoolingSpec() if name.endswith(BARE) else None


def _plain_score(folder: Folder, config: Mapping[str, Any]) -> bool:
    """Whether the authors want the score as it is; Sentence Transformers' cross encoders say so by a class's name."""
    said = config.get("sentence_transformers")
    function = said.get("activation_fn") if isinstance(said, dict) else None
    function = function or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    kind = str(function).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise ModelFileError(
            folder.path / "config.json", f"scores through {function!r}", "Use a model with Sigmoid or Identity"
        )
    return kind == "Identity"


def _chain(folder: Folder, text: str) -> PoolingSpec:
    try:
        modules = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in json.loads(text)]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ModelFileError(folder.path / _MODULES, f"damaged: {error!r}", "Copy it anew") from error
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ModelFileError(
            folder.path / _MODULES,
            f"the chain {' → '.join(kinds) or 'of nothing'} is not supported",
            "Use a model that is a transformer, a pooling and perhaps a normalisation",
        )
    where = PurePosixPath(modules[1][1]) / "config.json"
    if where.is_absolute() or ".." in where.parts:
        raise ModelFileError(folder.path / _MODULES, f"{str(where)!r} lies outside the folder", "Copy it anew")
    content = folder.parse(str(where), folder.need(str(where), "how the model pools"))
    return PoolingSpec(_kind(folder, str(where), content), normalise="Normalize" in kinds)


def _kind(folder: Folder, name: str, content: Mapping[str, Any]) -> PoolingKind:
    named = content.get("pooling_mode")
    found = [str(named)] if named is not None else [key for key, on in content.items() if _is_mode(key) and on]
    kinds = [_NAMES.get(key) or _FLAGS.get(key) for key in found]
    if len(kinds) != 1 or kinds[0] is None:
        raise ModelFileError(
            folder.path / name, f"pooling by {' and '.join(found) or 'nothing'} is not supported", _ADVICE
        )
    return kinds[0]


def _is_mode(key: str) -> bool:
    return key.startswith("pooling_mode_")
