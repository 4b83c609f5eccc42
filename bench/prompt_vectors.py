"""`python -m bench.prompt_vectors --data DIR --output FILE`: embed the prompts that the classifier is trained on.

As the cache process does: in its form of asking, whole or not at all. A few minutes of CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from cache.embedding.embedder import Embedder, Refused
from cache.words.asking import asked_form
from tiers.features import Message
from tiers.train import corpus, sheet
from tiers.train.vectors import PromptVectors
from tiers.vector import MODEL, asked

_BATCH = 8


def embed(conversations: Iterable[Sequence[Message]], vectors: PromptVectors, embedder: Embedder) -> None:
    """Add the vectors of these conversations; refused texts are added as such."""
    missing: dict[str, str] = {}
    for messages in conversations:
        text = asked(messages)
        if text is not None and text not in vectors:
            missing[text] = form = asked_form(text)
            try:
                embedder.check(form)
            except Refused:
                vectors.add(missing.popitem()[0], None)
    order = sorted(missing, key=len)  # alike in length, so that little is padded
    for start in range(0, len(order), _BATCH):
        batch = order[start : start + _BATCH]
        for text, vector in zip(batch, embedder.embed([missing[text] for text in batch]), strict=True):
            vectors.add(text, vector)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prompt_vectors", description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("TIERLINE_DATA"), help="default: $TIERLINE_DATA")
    parser.add_argument("--output", type=Path, required=True, help="where the vectors go, such as vectors.npz")
    options = parser.parse_args()
    if options.data is None or not options.data.is_dir():
        parser.error("give the folder of the data sets with --data or $TIERLINE_DATA (see tiers/DATA.md)")
    vectors = PromptVectors()
    prompts = [example.messages for example in corpus.load(options.data)]
    embed([*prompts, *(item.messages for item in sheet.load())], vectors, Embedder(MODEL))
    vectors.save(options.output)
    print(f"{options.output}: {len(vectors)} texts, {options.output.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
