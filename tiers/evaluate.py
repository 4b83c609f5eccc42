"""Judge the classifier and the tier choice with anyone's prompts: one JSON object per line, labels optional.

Each line has `messages` (or `prompt`, a text), and may have `task`, `tier`, `tools`, `response_format`, `max_tokens`.
Used by `tierline tiers evaluate`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from tiers import TIERS
from tiers.choose import DEFAULT_TIER, QUALITY_TARGET, choose
from tiers.task import TASKS, TaskClassifier

# Other names of the tasks, as data sets and teams use them.
ALIASES: Final = {
    "sentiment": "classification",
    "labelling": "classification",
    "labeling": "classification",
    "intent": "classification",
    "information_extraction": "extraction",
    "entity_extraction": "extraction",
    "ner": "extraction",
    "summarization": "summarisation",
    "summary": "summarisation",
    "rewrite": "rewriting",
    "paraphrasing": "rewriting",
    "editing": "rewriting",
    "grammar": "rewriting",
    "qa": "question_answering",
    "question": "question_answering",
    "questions": "question_answering",
    "open_qa": "question_answering",
    "closed_qa": "question_answering",
    "knowledge": "question_answering",
    "factual": "question_answering",
    "explanation": "question_answering",
    "chitchat": "chat",
    "conversation": "chat",
    "general_chat": "chat",
    "chatbot": "chat",
    "small_talk": "chat",
    "creative_writing": "writing",
    "text_generation": "writing",
    "generation": "writing",
    "creative": "writing",
    "ideation": "brainstorming",
    "ideas": "brainstorming",
    "code": "coding",
    "code_generation": "coding",
    "programming": "coding",
    "mathematics": "math",
    "maths": "math",
    "arithmetic": "math",
    "logic": "reasoning",
    "complex_reasoning": "reasoning",
    "analysis": "reasoning",
    "planning": "reasoning",
}


class InvalidPrompts(ValueError):
    """A line that cannot be read; the message names it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the file. `task` is None where the label is missing or not one of ours (`unknown_task`)."""

    line: int
    messages: list[dict[str, Any]]
    tools: bool
    response_format: dict[str, Any] | None
    max_tokens: int | None
    task: str | None
    unknown_task: str | None
    tier: str | None


@dataclass(frozen=True, slots=True)
class Judged:
    """What was decided for one prompt, and whether that is what the labels say (None: no label)."""

    prompt: Prompt
    task: str
    confidence: float
    complexity: float
    in_distribution: bool
    tier: str
    reason: str
    p_success: dict[str, float]
    lower: dict[str, float]

    @property
    def task_right(self) -> bool | None:
        return None if self.prompt.task is None else self.task == self.prompt.task

    @property
    def tier_right(self) -> bool | None:
        return None if self.prompt.tier is None else self.tier == self.prompt.tier

    def as_json(self) -> dict[str, Any]:
        return {
            "line": self.prompt.line,
            "task": self.task,
            "confidence": round(self.confidence, 4),
            "complexity": round(self.complexity, 4),
            "in_distribution": self.in_distribution,
            "tier": self.tier,
            "reason": self.reason,
            "p_success": {tier: round(p, 4) for tier, p in self.p_success.items()},
            "p_success_lower": {tier: round(p, 4) for tier, p in self.lower.items()},
            "expected_task": self.prompt.task,
            "expected_tier": self.prompt.tier,
            "task_right": self.task_right,
            "tier_right": self.tier_right,
        }


def read(lines: Iterable[str]) -> Iterator[Prompt]:
    """Prompts of JSON lines; blank lines are skipped.

    Raises:
        InvalidPrompts: a line is not a JSON object with messages, or names a tier that does not exist.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise InvalidPrompts(f"line {number}: not JSON: {error}") from error
        if not isinstance(item, dict):
            raise InvalidPrompts(f"line {number}: expected an object with 'messages', got {type(item).__name__}")
        yield _prompt(number, item)


def _prompt(number: int, item: dict[str, Any]) -> Prompt:
    messages = item.get("messages")
    if messages is None and isinstance(item.get("prompt"), str):
        messages = [{"role": "user", "content": item["prompt"]}]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise InvalidPrompts(f"line {number}: 'messages' must be a list of messages with 'role' and 'content'")
    tier, label = item.get("tier"), item.get("task")
    if tier is not None and tier not in TIERS:
        raise InvalidPrompts(f"line {number}: there is no tier {tier!r}; tiers are {', '.join(TIERS)}")
    task = _task(label) if label is not None else None
    form = item.get("response_format")
    return Prompt(
        line=number,
        messages=messages,
        tools=bool(item.get("tools")),
        response_format=form if isinstance(form, dict) else None,
        max_tokens=item.get("max_tokens"),
        task=task,
        unknown_task=str(label) if label is not None and task is None else None,
        tier=tier,
    )


def _task(label: object) -> str | None:
    name = str(label).strip().lower().replace(" ", "_").replace("-", "_")
    name = ALIASES.get(name, name)
    return name if name in TASKS else None


def judge(
    prompts: Iterable[Prompt],
    classifier: TaskClassifier,
    tiers_available: Iterable[str] = TIERS,
    quality_target: float = QUALITY_TARGET,
    default_tier: str = DEFAULT_TIER,
) -> list[Judged]:
    """Decide every prompt as `tier: auto` would. Raises as `choose`."""
    offered = tuple(tiers_available)
    found = []
    for prompt in prompts:
        profile = classifier.classify(prompt.messages, prompt.tools, prompt.response_format, prompt.max_tokens)
        choice = choose(profile, offered, quality_target, default_tier)
        found.append(
            Judged(
                prompt,
                profile.task,
                profile.confidence,
                profile.complexity,
                profile.in_distribution,
                choice.tier,
                choice.reason,
                choice.p_success,
                choice.lower,
            )
        )
    return found


def summary(judged: list[Judged]) -> dict[str, Any]:
    """Counts and accuracies; an accuracy is None where no line has such a label.

    `accuracy` is that of the tiers where any line names one, else that of the tasks.
    """
    tasks = [item.task_right for item in judged if item.task_right is not None]
    labelled = [item for item in judged if item.prompt.tier is not None]
    tiers = [item.tier_right for item in labelled]
    near = [abs(TIERS.index(item.tier) - TIERS.index(str(item.prompt.tier))) <= 1 for item in labelled]
    task_accuracy, tier_accuracy = _share(tasks), _share(tiers)
    return {
        "count": len(judged),
        "accuracy": task_accuracy if tier_accuracy is None else tier_accuracy,
        "tier_accuracy": tier_accuracy,
        "tier_within_one": _share(near),
        "tier_labels": len(labelled),
        "task_accuracy": task_accuracy,
        "task_labels": len(tasks),
        "in_distribution": _share([item.in_distribution for item in judged]),
        "unknown_task_labels": sorted({item.prompt.unknown_task for item in judged if item.prompt.unknown_task}),
        "tiers": {tier: sum(item.tier == tier for item in judged) for tier in TIERS},
    }


def _share(values: list[Any]) -> float | None:
    return round(sum(map(bool, values)) / len(values), 4) if values else None
