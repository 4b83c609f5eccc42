"""`python -m tiers.train --data DIR --vectors FILE`: train the classifier and the success table and write them beside
the code. `python -m bench.prompt_vectors` makes FILE; without it the classifier judges by words only.

Deterministic for the same data and library versions. Takes a few minutes and about 1 GB of memory.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tiers.success import TABLE_FILE
from tiers.task import MODEL_FILE
from tiers.train import corpus
from tiers.train.training import train
from tiers.train.vectors import PromptVectors


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tiers.train", description=__doc__)
    parser.add_argument("--data", type=Path, default=os.environ.get("TIERLINE_DATA"), help="default: $TIERLINE_DATA")
    parser.add_argument("--vectors", type=Path, help="vectors of the prompts, to judge by where a request has one")
    parser.add_argument("--model", type=Path, default=MODEL_FILE, help="where the classifier goes")
    parser.add_argument("--table", type=Path, default=TABLE_FILE, help="where the success table goes")
    options = parser.parse_args()
    if options.data is None or not options.data.is_dir():
        parser.error("give the folder of the data sets with --data or $TIERLINE_DATA")
    examples = corpus.load(options.data)
    print(f"{len(examples)} examples of {len({e.kind for e in examples})} kinds")
    weights, table = train(examples, None if options.vectors is None else PromptVectors.load(options.vectors))
    weights.save(options.model)
    table.save(options.table)
    slopes = table.slopes.values()
    print(
        f"{options.model}: {options.model.stat().st_size / 1024:.0f} KiB, temperature {weights.words.temperature:.2f}"
    )
    print(f"{options.table}: slopes of complexity {min(slopes):.2f} to {max(slopes):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
