"""The labelled prompts that the classifier learns from, read from a folder of public data sets.

Expected below DIR: llmrouter_scores, mmlu_pro_correctness, zeroeval_correctness, frugalgpt_headlines, instructions,
clinc150, banking77 (see tiers/DATA.md for where they come from). Only learned weights leave this folder.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiers.train import labels, templates

csv.field_size_limit(sys.maxsize)

SEED = 20261129
# llmrouter's benchmarks -> kind
BENCHMARKS = {
    "gsm8k": "word_problem",
    "agentverse-mgsm": "word_problem",
    "math": "competition_math",
    "mbpp": "write_function",
    "human_eval": "write_function",
    "mmlu": "exam_question",
    "arc_challenge": "exam_question",
    "openbook_qa": "exam_question",
    "commonsense_qa": "exam_question",
    "gpqa": "graduate_question",
    "trivia_qa": "recall_fact",
    "natural_qa": "recall_fact",
    "commongen": "words_to_sentence",
    "agentverse-logicgrid": "logic_puzzle",
}
# Sources whose prompts were labelled by hand (`labels.py`): the nearest to real traffic.
HAND_LABELLED = ("seed_tasks", "user_oriented", "arena_hard", "vicuna")
# Prompts as people write them: those, and ours (`prompts.tsv`).
REAL = (*HAND_LABELLED, "written")
PROMPTS_FILE = Path(__file__).with_name("prompts.tsv")
MMLU_PRO_GRADUATE = {"physics", "chemistry", "engineering", "math", "law"}


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt: where it is from, what kind it is, and the measured score per model where there is one."""

    source: str
    kind: str
    messages: list[dict[str, Any]]
    scores: dict[str, float]


def rows(path: Path) -> Iterator[dict[str, str]]:
    """Rows of a gzipped CSV file with a header."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _scores(row: dict[str, str], known: set[str]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if name not in known and value not in ("", None)}


def llmrouter(data: Path) -> list[Example]:
    """6,108 queries of 14 benchmarks with the scores of nine models of 7B to 70B."""
    return [
        Example(
            f"llmrouter/{row['task_name']}",
            BENCHMARKS[row["task_name"]],
            _user(row["query"]),
            _scores(row, {"split", "task_name", "query"}),
        )
        for row in rows(data / "llmrouter_scores/llmrouter_scores.csv.gz")
    ]


def mmlu_pro(data: Path) -> list[Example]:
    """12,032 exam questions with right or wrong of 17 models; every other one is shown with its options."""
    found = []
    for number, row in enumerate(rows(data / "mmlu_pro_correctness/mmlu_pro_correctness.csv.gz")):
        text = row["question"]
        if number % 2:
            options = json.loads(row["options_json"])
            text += "\n" + "\n".join(f"{chr(65 + i)}. {option}" for i, option in enumerate(options))
        kind = "graduate_question" if row["category"] in MMLU_PRO_GRADUATE else "exam_question"
        scores = _scores(row, {"question_id", "category", "question", "options_json", "answer"})
        found.append(Example("mmlu_pro", kind, _user(text), scores))
    return found


def zeroeval(data: Path) -> list[Example]:
    """GSM8K, CRUXEval and MATH level 5 with right or wrong of 18 to 22 models of 2B to 70B and beyond."""
    files = {"gsm": "word_problem", "crux": "trace_code", "math-l5": "competition_math"}
    return [
        Example(f"zeroeval/{name}", kind, _user(row["question"]), _scores(row, {"id", "question", "answer"}))
        for name, kind in files.items()
        for row in rows(data / f"zeroeval_correctness/{name}.csv.gz")
    ]


def headlines(data: Path) -> list[Example]:
    """Headlines of the gold market to be labelled, in their original `Q: ... A:` form."""
    with gzip.open(data / "frugalgpt_headlines/train.csv.gz", "rt", encoding="utf-8", newline="") as file:
        return [Example("headlines", "label_text", _user(row[0]), {}) for row in csv.reader(file)]


def small_talk(data: Path) -> list[Example]:
    """Utterances to assistants: commands and small talk (CLINC150), customers' questions (Banking77)."""
    with gzip.open(data / "clinc150/data_full.json.gz", "rt", encoding="utf-8") as file:
        clinc = [text for text, _ in json.load(file)["train"]]
    banking = [row["text"] for row in rows(data / "banking77/train.csv.gz")]
    return [Example("clinc", "small_talk", _user(text), {}) for text in clinc] + [
        Example("banking", "small_talk", _user(text), {}) for text in banking
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def instructions(data: Path) -> list[Example]:
    """Prompts labelled by hand (`labels.py`)."""
    found = []
    for source, name, letters in (
        ("seed_tasks", "self_instruct_seed_tasks_175", labels.SEED_TASKS),
        ("user_oriented", "self_instruct_user_oriented_252", labels.USER_ORIENTED),
    ):
        tasks = _lines(data / f"instructions/{name}.jsonl.gz")
        for task, kind in zip(tasks, labels.kinds(letters, len(tasks)), strict=True):
            text = f"{task['instruction']}\n\n{task['instances'][0]['input']}".strip()
            if kind:
                found.append(Example(source, kind, _user(text), {}))
    arena = _lines(data / "instructions/arena_hard_v0.1_500.jsonl.gz")
    for task, kind in zip(arena, labels.kinds(labels.ARENA_HARD, len(arena)), strict=True):
        if kind:
            found.append(Example("arena_hard", kind, _user(task["prompt"]), {}))
    for task in _lines(data / "instructions/vicuna_bench_80.jsonl.gz"):
        letter = labels.VICUNA.get(task["category"])
        if letter:
            found.append(Example("vicuna", labels.LETTERS[letter], _user(task["turns"][0]), {}))
    return found


def written() -> list[Example]:
    """Prompts written for this training, kind and text on a line each."""
    lines = PROMPTS_FILE.read_text(encoding="utf-8").splitlines()
    return [Example("written", kind, _user(text), {}) for kind, _, text in (line.partition("\t") for line in lines)]


def patterns(data: Path, per_kind: int = 500) -> list[Example]:
    """Prompts from `templates.py` over texts of the other sets."""
    rng = random.Random(SEED)
    texts = [row["text"] for row in rows(data / "banking77/train.csv.gz")]
    texts += [str(e.messages[0]["content"])[3:].partition("\nA:")[0] for e in headlines(data)[:2000]]
    texts += [str(e.messages[0]["content"])[:500] for e in zeroeval(data)[:600]]
    texts += [str(e.messages[0]["content"])[:700] for e in llmrouter(data) if e.source == "llmrouter/mmlu"]
    rng.shuffle(texts)
    return [
        Example("patterns", kind, messages, {})
        for kind in templates.kinds()
        for messages in templates.prompts(kind, per_kind, texts, SEED)
    ]


def load(data: Path) -> list[Example]:
    """All examples, large sources thinned to a fixed random sample. Deterministic.

    Raises:
        FileNotFoundError: a data set is missing below `data`.
    """
    rng = random.Random(SEED)

    def some(examples: list[Example], count: int) -> list[Example]:
        return rng.sample(examples, min(count, len(examples)))

    return [
        *llmrouter(data),
        *some(mmlu_pro(data), 2000),
        *zeroeval(data),
        *some(headlines(data), 500),
        *some(small_talk(data), 1500),
        *instructions(data),
        *written(),
        *patterns(data),
    ]
