"""Make the ONNX model of an embedder once, in a process of its own, and check it before anybody uses it.

The process loads PyTorch for its vectors, compares, writes, and ends; the cache process never needs it. Run by hand,
for instance while an image is built:

    python -m cache.embedding.prepare --embedder all-MiniLM-L6-v2 --backend onnx-int8 --to var/embedders
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache.embedding.folder import Description, EmbedderError, describe, find_model, fingerprint
from cache.embedding.onnx_backend import ABOUT, MODEL, VECTORS, About, OnnxEncoder, session, tokenizer
from cache.embedding.probes import PROBES

if TYPE_CHECKING:
    import onnx

    from cache.embedding.torch_backend import TorchEncoder

Vectors = NDArray[np.float32]

_TIMEOUT_S = 600.0
# The most by which the cosine of two probes may differ from PyTorch's: it is cosines that the cache compares.
MOST_SHIFT = {"onnx": 0.001, "onnx-int8": 0.03}


def folder_name(fingerprint: str) -> str:
    """Of a prepared model among others. 128 bits of the digest tell them apart."""
    return fingerprint[:32]


def prepared(model: Description, backend: str, fingerprint: str, stores: Sequence[Path]) -> Path:
    """The folder of the prepared model in one of `stores`, made in the first if none has it; that takes ten seconds.

    Raises:
        EmbedderError: it cannot be made or written, or its vectors are too far from PyTorch's.
    """
    folders = [store / folder_name(fingerprint) for store in stores]
    for folder in folders:
        if (folder / ABOUT).is_file():
            return folder
    command = [sys.executable, "-m", "cache.embedding.prepare", "--embedder", str(model.folder)]
    command += ["--backend", backend, "--to", str(stores[0])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EmbedderError(f"the embedder could not be prepared: {error}") from error
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        raise EmbedderError(f"the embedder could not be prepared: {reason[-1]}")
    return folders[0]


def make(model: Description, backend: str, folder: Path) -> About:
    """Build, check and write the model; whoever comes second finds it there.

    Raises:
        EmbedderError: its vectors are too far from PyTorch's.
        OSError: the folder cannot be written.
    """
    from cache.embedding.torch_backend import TorchEncoder

    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(".draft-*"):  # by a process that was killed
        if time.time() - left.stat().st_mtime > _TIMEOUT_S:
            shutil.rmtree(left, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    try:
        content = build(model, backend).SerializeToString()
        found = OnnxEncoder(model, content, threads=1).encode(list(PROBES))
        about = _compare(backend, content, found, TorchEncoder(model.folder, str(model.folder), threads=1))
        if not about.cosine_shift <= MOST_SHIFT[backend]:
            raise EmbedderError(
                f"with {backend} the cosine of two texts differs by up to {about.cosine_shift:.4f} from PyTorch's, "
                f"more than {MOST_SHIFT[backend]}: set cache.embedder_backend to torch."
            )
        _write(draft / MODEL, content)
        np.save(draft / VECTORS, found)
        _write(draft / ABOUT, msgspec.json.encode(about))
        try:
            draft.rename(folder)
        except OSError:
            if not (folder / ABOUT).is_file():  # what is there is not another process's finished work
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return about


def build(model: Description, backend: str) -> onnx.ModelProto:
    """The graph of a backend; an int8 one is calibrated on the probes."""
    from cache.embedding import bert

    exact = bert.build(model)
    if backend == "onnx":
        return exact
    layers = bert.linear_inputs(model)
    names = sorted(set(layers.values()))
    running = session(bert.with_outputs(exact, names).SerializeToString(), threads=1)
    words = tokenizer(model)
    maxima = {name: np.zeros(model.hidden_size, dtype=np.float32) for name in names}
    for text in PROBES:
        ids = np.array([words.encode(text).ids])  # [1, tokens]
        found = running.run(names, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        for name, rows in zip(names, found, strict=True):
            np.maximum(maxima[name], np.abs(rows).max(axis=0), out=maxima[name])
    return bert.build(model, {layer: maxima[name] for layer, name in layers.items()})


def _compare(backend: str, content: bytes, found: Vectors, peer: TorchEncoder) -> About:
    wanted = np.concatenate([peer.encode([text]) for text in PROBES])
    cosines = (found * wanted).sum(axis=1)
    return About(
        backend=backend,
        sha256=hashlib.sha256(content).hexdigest(),
        least_cosine=float(cosines.min()),
        mean_cosine=float(cosines.mean()),
        cosine_shift=float(np.abs(found @ found.T - wanted @ wanted.T).max()),
    )


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 made, or there already; 1 it cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m cache.embedding.prepare", description=__doc__)
    parser.add_argument("--embedder", default="all-MiniLM-L6-v2", help="sentence-transformers model: name or folder")
    parser.add_argument("--backend", choices=sorted(MOST_SHIFT), default="onnx-int8")
    parser.add_argument("--to", type=Path, required=True, help="folder that holds one folder for each model")
    options = parser.parse_args(arguments)
    try:
        folder = find_model(options.embedder)
        target = options.to / folder_name(fingerprint(folder, options.backend))
        if not (target / ABOUT).is_file():
            print(msgspec.json.encode(make(describe(folder), options.backend, target)).decode())
    except (EmbedderError, ImportError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
