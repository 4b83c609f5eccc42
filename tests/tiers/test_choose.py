"""The choice of a tier: smallest that is good enough, never silently the cheapest, gaps of the data kept visible."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers import TIERS
from tiers.beta import logit, sigmoid
from tiers.choose import WORTHWHILE_GAIN, bound_text, choose, target_text
from tiers.success import TABLE_FILE, Cell, SuccessTable, default_table
from tiers.task import KINDS, TASKS, TaskProfile, default_classifier


def profile(
    kind: str = "small_talk", known: bool = True, tools: float = 0.0, complexity: float | None = None
) -> TaskProfile:
    kinds = {name: float(name == kind) for name in KINDS}
    usual = default_table().complexity[kind]
    return TaskProfile(
        task=KINDS[kind],
        confidence=1.0,
        complexity=usual if complexity is None else complexity,
        in_distribution=known,
        features={"tools": tools, "known_words": 0.1},
        probabilities={task: float(task == KINDS[kind]) for task in TASKS},
        kinds=kinds,
    )


def table(**rows: tuple[float, float, float, float]) -> SuccessTable:
    """A table whose named kinds have these probabilities, for sure; all others those of the shipped one."""
    cells = dict(default_table().cells)
    for kind, row in rows.items():
        cells[kind] = {tier: Cell(p, 100, "measured", 1e9) for tier, p in zip(TIERS, row, strict=True)}
    return SuccessTable(cells, default_table().complexity, dict.fromkeys(KINDS, -3.0))


@pytest.mark.parametrize(
    ("row", "target", "tier"),
    [
        ((0.85, 0.9, 0.95, 0.97), 0.8, "small"),
        ((0.70, 0.9, 0.95, 0.97), 0.8, "medium"),
        ((0.70, 0.9, 0.95, 0.97), 0.96, "xlarge"),
        ((0.10, 0.2, 0.30, 0.50), 0.8, "xlarge"),
        ((0.30, 0.31, 0.32, 0.33), 0.8, "small"),
        ((0.10, 0.47, 0.48, 0.50), 0.8, "medium"),
    ],
)
def test_the_smallest_tier_that_is_good_enough(
    row: tuple[float, float, float, float], target: float, tier: str
) -> None:
    found = choose(profile(), TIERS, target, table=table(small_talk=row))
    assert found.tier == tier
    assert list(found.p_success.values()) == pytest.approx(list(row))
    assert f"'{tier}'" in found.reason


def test_only_tiers_that_are_offered() -> None:
    low = table(small_talk=(0.1, 0.2, 0.9, 0.95))
    assert choose(profile(), ["small", "medium"], table=low).tier == "medium"
    assert choose(profile(), ["xlarge"], table=low).tier == "xlarge"


def test_unknown_texts_get_the_default_and_say_so() -> None:
    found = choose(profile(known=False), default_tier="large")
    assert (found.tier, found.p_success) == ("large", {})
    assert "unlike the training data" in found.reason


def test_tools_need_more_than_the_smallest() -> None:
    easy = table(small_talk=(0.95, 0.96, 0.97, 0.98))
    assert choose(profile(tools=1.0), table=easy).tier == "medium"
    assert choose(profile(tools=1.0), ["small"], table=easy).tier == "small"


@pytest.mark.parametrize(
    ("tiers", "target", "words"),
    [
        ([], 0.8, "no tier is available"),
        (["huge"], 0.8, "unknown tier huge"),
        (TIERS, 0, "quality_target"),
        (TIERS, 1.1, "quality"),
    ],
)
def test_bad_arguments(tiers: list[str], target: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose(profile(), tiers, target)


@given(st.sampled_from(list(KINDS)), st.floats(0.01, 1), st.floats(0, 1), st.sets(st.sampled_from(TIERS), min_size=1))
def test_a_choice_is_justified(kind: str, target: float, complexity: float, offered: set[str]) -> None:
    found = choose(profile(kind, complexity=complexity), offered, target)
    assert found.tier in offered
    chosen = found.lower[found.tier]
    smaller = [found.lower[t] for t in TIERS[: TIERS.index(found.tier)] if t in offered]
    if chosen >= target:
        assert all(p < target for p in smaller)
    else:
        assert max(found.lower.values()) < target
        assert chosen >= max(found.lower.values()) - WORTHWHILE_GAIN
    assert all(found.lower[tier] <= found.p_success[tier] for tier in offered)


@given(st.sampled_from(list(KINDS)), st.floats(0, 1), st.floats(0, 1))
def test_success_never_falls_with_size_nor_rises_with_complexity(kind: str, one: float, other: float) -> None:
    low, high = sorted((one, other))
    easy = [default_table().p_success(profile(kind, complexity=low), tier) for tier in TIERS]
    hard = [default_table().p_success(profile(kind, complexity=high), tier) for tier in TIERS]
    assert [e.mean for e in easy] == sorted(e.mean for e in easy)
    assert [e.lower for e in easy] == sorted(e.lower for e in easy)
    assert all(h.mean <= e.mean + 1e-12 and h.lower <= e.lower + 1e-12 for e, h in zip(easy, hard, strict=True))


def test_the_tiers_as_they_are_meant() -> None:
    """The definition of the tiers: simple classification and extraction, general chat, complex reasoning."""
    classify = default_classifier().classify

    def tier(text: str) -> str:
        return choose(classify([{"role": "user", "content": text}])).tier

    assert tier("Is this message spam? Answer yes or no.\n\nCongratulations, you won a phone!") == "small"
    assert tier("Extract the names and dates from this note: Ada met Charles on 5 June 1833.") == "small"
    assert tier("Hello! How has your week been?") == "medium"
    assert tier("Hi! Think step by step, pros and cons, be thorough.") == "medium"
    assert (
        tier("Compare three strategies for entering the Brazilian market, weigh the risks and justify one.") == "large"
    )
    assert tier(
        "A beam of neutrons with energy 2 MeV scatters elastically off deuterium; find the maximum energy loss."
    ) in (
        "large",
        "xlarge",
    )


def test_the_shipped_table_shows_its_gaps() -> None:
    sources = {cell.source for row in default_table().cells.values() for cell in row.values()}
    assert sources == {"measured", "interpolated", "prior"}
    for row in default_table().cells.values():
        for cell in row.values():
            assert (cell.trials > 0) or cell.source != "measured"


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    data = json.loads(TABLE_FILE.read_text())
    del data["cells"]["small_talk"]["large"]
    (tmp_path / "a.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="'small_talk' needs one cell"):
        SuccessTable.load(tmp_path / "a.json")
    data = json.loads(TABLE_FILE.read_text())
    data["cells"]["small_talk"]["large"]["p"] = 1.0
    (tmp_path / "b.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="between 0 and 1"):
        SuccessTable.load(tmp_path / "b.json")


def test_a_table_survives_saving(tmp_path: Path) -> None:
    default_table().save(tmp_path / "t.json")
    assert dataclasses.asdict(SuccessTable.load(tmp_path / "t.json")) == dataclasses.asdict(default_table())


@given(st.floats(-20, 20))
def test_sigmoid_inverts_logit(x: float) -> None:
    assert logit(sigmoid(x)) == pytest.approx(max(-13.8155, min(13.8155, x)), abs=1e-3)


@pytest.mark.parametrize(
    ("lower", "target", "text"),
    [
        (0.8964, 0.9, "0.896"),
        (0.89996, 0.9, "0.89996"),
        (0.9, 0.9, "0.90"),
        (0.8961, 0.896, "0.90"),
        (0.8941, 0.894, "0.894"),
        (0.5, 0.9, "0.50"),
        (0.8964, None, "0.90"),
    ],
)
def test_a_bound_is_shown_with_the_digits_that_tell_it_from_the_target(
    lower: float, target: float | None, text: str
) -> None:
    assert bound_text(lower, target) == text


def test_a_target_is_shown_whole() -> None:
    assert [target_text(target) for target in (0.9, 0.895, 1)] == ["0.90", "0.895", "1.00"]
