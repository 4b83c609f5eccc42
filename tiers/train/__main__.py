"""`python -m tiers.train --data DIR --vectors FILE`: train the classifier and the success table and write them beside
the code. `python -m bench.prompt_vectors` makes FILE; without it the classifier judges by words only.

Deterministic for the same data and library versions. Takes a few minutes and about 1 GB of memory.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from tiers.success import TABLE_FILE, SuccessTable
from tiers.task import KINDS, MODEL_FILE, TaskClassifier, Weights
from tiers.train import corpus, outcomes
from tiers.train.corpus import Example
from tiers.train.fit import difficulty, fit
from tiers.train.vectors import PromptVectors


def train(examples: list[Example], vectors: PromptVectors | None = None) -> tuple[Weights, SuccessTable]:
    """Classifier and table over `examples`; the slope is fitted on a fifth that a first classifier has not seen.

    It is that of the complexity by words; the one by vectors is calibrated as well under it (`make bench-routing`).
    """
    plain = outcomes.build(examples)
    by_kind: dict[str, list[float]] = defaultdict(list)
    for example in examples:
        by_kind[example.kind].append(difficulty(example, plain))
    complexity = {kind: fmean(by_kind[kind]) if by_kind[kind] else 0.5 for kind in KINDS}
    kept = [example for i, example in enumerate(examples) if i % 5]
    held = [example for i, example in enumerate(examples) if i % 5 == 0 and example.scores]
    probe = TaskClassifier(fit(kept, plain))
    table = outcomes.build(examples, complexity)
    slope = outcomes.fit_slope(table, held, [probe.classify(e.messages) for e in held])
    return fit(examples, plain, vectors), SuccessTable(table.cells, complexity, slope)


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
    print(
        f"{options.model}: {options.model.stat().st_size / 1024:.0f} KiB, temperature {weights.words.temperature:.2f}"
    )
    print(f"{options.table}: slope of complexity {table.slope:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
