"""The sheet of prompts that were labelled by hand with a tier and a task: `tiers/labels/*.tsv`, by `RULES.md` there.

`public.tsv` holds prompts of public collections, `own.tsv` those written for Tierline. One prompt a line; a line break
inside one is written as \\n, a tab as \\t, a backslash as \\\\.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiers import TIERS
from tiers.task import TASKS

FOLDER = Path(__file__).parents[1] / "labels"
COLUMNS = ("id", "tier", "task", "reason", "prompt")
_UNESCAPED = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}


@dataclass(frozen=True, slots=True)
class Labelled:
    """One prompt: `id` is COLLECTION/NUMBER, the number that of the line in the collection's own file, from 0."""

    id: str
    tier: str
    task: str
    reason: str
    prompt: str

    @property
    def collection(self) -> str:
        return self.id.partition("/")[0]

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.prompt}]


def load(folder: Path = FOLDER) -> list[Labelled]:
    """All prompts of the sheet, by file and line.

    Raises:
        ValueError: a line has too few or too many columns, an unknown tier or task, or an id that is there already.
    """
    found: dict[str, Labelled] = {}
    for path in sorted(folder.glob("*.tsv")):
        lines = path.read_text(encoding="utf-8").splitlines()
        if not lines or tuple(lines[0].split("\t")) != COLUMNS:
            raise ValueError(f"{path}: the first line must name the columns {', '.join(COLUMNS)}")
        for number, line in enumerate(lines[1:], 2):
            cells = line.split("\t")
            if len(cells) != len(COLUMNS):
                raise ValueError(f"{path}:{number}: {len(cells)} columns, expected {len(COLUMNS)}")
            name, tier, task, reason, prompt = cells
            item = Labelled(name, tier, task, reason, re.sub(r"\\[nt\\]", lambda m: _UNESCAPED[m[0]], prompt))
            if item.tier not in TIERS or item.task not in TASKS:
                raise ValueError(f"{path}:{number}: there is no tier '{item.tier}' or no task '{item.task}'")
            if item.id in found:
                raise ValueError(f"{path}:{number}: '{item.id}' is there twice")
            found[item.id] = item
    return list(found.values())
