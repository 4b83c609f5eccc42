"""`python -m bench.word_vectors`: make `tiers/words.npz`, a vector per English word, from the cache's embedding model.

The words are those of the model's own vocabulary, which is sorted by frequency. Each is embedded alone, the mean is
taken away, and the 64 directions of the largest variance are kept, as 8-bit integers. Takes two minutes of CPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from cache.embedding.embedder import Embedder
from cache.embedding.folder import find_model
from tiers.words import SIZE, WORDS_FILE

MODEL = "all-MiniLM-L6-v2"
WORDS = 16_384
# Typical length of the scaled vectors: beside the other inputs of the classifier, which lie between 0 and 1, a larger
# one lets it learn the training words by heart, a smaller one is not heard.
LENGTH = 3.0
_BATCH = 64


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.word_vectors", description=__doc__)
    parser.add_argument("--output", type=Path, default=WORDS_FILE, help="where the vectors go")
    options = parser.parse_args()
    embedder = Embedder(MODEL)
    vocabulary = Tokenizer.from_file(str(find_model(MODEL) / "tokenizer.json")).get_vocab()
    words = [word for word in sorted(vocabulary, key=vocabulary.__getitem__) if word.isascii() and word.isalpha()]
    words = [word for word in words if len(word) > 1][:WORDS]
    found = np.vstack([embedder.embed(words[i : i + _BATCH]) for i in range(0, len(words), _BATCH)])
    centred = found - found.mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    vectors = centred @ directions[:SIZE].T * LENGTH
    scale = float(np.abs(vectors).max()) / 127
    rounded = np.round(vectors / scale).astype(np.int8)
    np.savez_compressed(options.output, words=np.array("\n".join(words)), vectors=rounded, scale=scale)
    print(f"{options.output}: {len(words)} words, {options.output.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
