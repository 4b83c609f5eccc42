"""What the router does with texts that it cannot know, and with texts that try to get a larger model."""

from __future__ import annotations

import gzip
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from bench.report import Row
from bench.routing_judges import OURS, Judge, one
from tiers import TIERS
from tiers.choose import choose
from tiers.train import sheet
from tiers.train.evaluate import HeldOut, calibration_error

_KEYWORDS = (
    "prove theorem algorithm architecture quantum integral complex analysis optimise distributed concurrency legal"
    " eigenvalue derivation"
)
GAMES = {
    "step by step": "{x} Let's think step by step.",
    "a tip": "{x} I'll tip you $500 for a perfect answer.",
    "pleas": "This is very important to my career. {x} Be thorough, think carefully, give pros and cons.",
    "keywords after": "{x} " + _KEYWORDS,
    "keywords before": _KEYWORDS + "\n\n{x}",
    "10,000 times 'complex'": "{x} " + "complex " * 10_000,
    "the text 50 times": "{x}\n" * 50,
}


def _scores(classifier: Judge, texts: Sequence[str]) -> list[float]:
    return [classifier.classify([{"role": "user", "content": text}]).unfamiliarity for text in texts]


def unknown_rows(classifier: Judge, left_out: Sequence[HeldOut], data: Path) -> list[Row]:
    """Unfamiliarity of texts of several sorts, and its calibration between known prompts and foreign ones."""
    with gzip.open(data / "pawsx_zh/dev_2k.tsv.gz", "rt", encoding="utf-8") as file:
        chinese = [line.split("\t")[1] for line in file][1:]
    with gzip.open(data / "clinc150/data_full.json.gz", "rt", encoding="utf-8") as file:
        clinc = json.load(file)
    with gzip.open(data / "bing_covid_queries/QueriesByCountry_2020-01.tsv.gz", "rt", encoding="utf-8") as file:
        queries = [line.split("\t") for line in file][1:]
    languages = {"Germany", "Spain", "Italy", "France", "Brazil", "Poland"}
    foreign = sorted({row[1] for row in queries if len(row) > 3 and row[3] in languages and len(row[1].split()) > 3})
    rng = random.Random(3)
    gibberish = [
        " ".join("".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 9))) for _ in range(12))
        for _ in range(500)
    ]
    code = [path.read_text(encoding="utf-8")[:1500] for path in sorted(Path(__file__).parent.glob("*.py"))]
    scores = {
        "hand-labelled prompts, collection left out": [r.profile.unfamiliarity for r in left_out],
        "Clinc150, in scope": _scores(classifier, [text for text, _ in clinc["test"]][::3]),
        "Clinc150, out of scope": _scores(classifier, [text for text, _ in clinc["oos_test"]]),
        "Python files without a question": _scores(classifier, code),
        "search queries of other languages": _scores(classifier, foreign[:1000]),
        "Chinese sentences": _scores(classifier, chinese),
        "gibberish": _scores(classifier, gibberish),
    }
    rows = []
    for name, found in scores.items():
        setting = f"{name} (n={len(found)})"
        rows.append(one("out_of_distribution", OURS, setting, "share", statistics.fmean(s >= 0.5 for s in found)))
        rows.append(Row.of("unfamiliarity", OURS, setting, "score", found))
    known = scores["hand-labelled prompts, collection left out"]
    strange = rng.sample(scores["Chinese sentences"] + scores["gibberish"] * 4, len(known))
    error = calibration_error([*known, *strange], [0.0] * len(known) + [1.0] * len(strange))
    setting = f"hand-labelled against as many Chinese and gibberish texts (n={2 * len(known)})"
    rows.append(one("unfamiliarity_calibration_error", OURS, setting, "share", error))
    return rows


def gaming_rows(classifier: Judge) -> list[Row]:
    """How the tier of the sheet's prompts changes when something is added that changes nothing of the task."""
    prompts = [item.prompt for item in sheet.load()]

    def tiers(pattern: str) -> list[int]:
        texts = [pattern.replace("{x}", prompt) for prompt in prompts]
        return [TIERS.index(choose(classifier.classify([{"role": "user", "content": t}])).tier) for t in texts]

    plain = tiers("{x}")
    rows = []
    for name, pattern in GAMES.items():
        steps = [gamed - before for before, gamed in zip(plain, tiers(pattern), strict=True)]
        for metric, matches in (
            ("tier_unchanged", [s == 0 for s in steps]),
            ("tier_one_up", [s == 1 for s in steps]),
            ("tier_more_up", [s > 1 for s in steps]),
            ("tier_down", [s < 0 for s in steps]),
        ):
            rows.append(one(metric, OURS, f"{name} (n={len(steps)})", "share", statistics.fmean(matches)))
    return rows
