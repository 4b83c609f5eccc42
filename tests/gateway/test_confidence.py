"""How sure an answer is: what its tokens say, a model's curve, and requests that are escalated by it."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from backends.attempt import Answer
from backends.openai import decode_answer
from gateway.escalating import calibrating
from gateway.escalating.answers import FLOOR, Token, tokens_of, without_logprobs
from gateway.escalating.calibrating import InvalidExamples, Observed, calibration_error, is_right, measure, read
from gateway.escalating.confidence import Curve, Curves, features, write
from tests.gateway.front_door import events
from tests.gateway.tiered import Tiered, tiered

SURE = [{"token": "Yes", "logprob": -0.01, "bytes": None, "top_logprobs": [{"token": "No", "logprob": -5.0}]}]
UNSURE = [{"token": "Yes", "logprob": -1.5, "bytes": None, "top_logprobs": [{"token": "No", "logprob": -0.4}]}]
BY_CURVE = "escalate: {when: [low_confidence], confidence: 0.8, streams: buffer}\n"


def curve(model: str = "s", **values: Any) -> Curve:
    """By it -0.01 is 0.98, and -1.5 is 0.27."""
    said = {"bias": 4.0, "by_logprob": 3.3, "by_margin": 0.0, "examples": 50, "right": 30, "ece_before": 0.3}
    return msgspec.convert({"model": model, **said, "ece_after": 0.05, "fitted_at": "", **values}, Curve)


def test_the_tokens_of_a_chat() -> None:
    (token,) = tokens_of({"content": UNSURE})
    assert token.logprob == -1.5
    assert token.margin == pytest.approx(math.exp(-1.5) - math.exp(-0.4))
    # The drawn token among the likeliest is not its own rival; without others, what is left is the most that one has.
    (token,) = tokens_of(
        {"content": [{"token": "a", "logprob": -0.1, "top_logprobs": [{"token": "a", "logprob": -0.1}]}]}
    )
    assert token.margin == pytest.approx(2 * math.exp(-0.1) - 1)
    assert tokens_of({"content": [{"token": "a", "logprob": -9999.0}]})[0].logprob == FLOOR
    assert tokens_of({"content": [{"token": "a", "logprob": None}, {"logprob": float("nan")}, "x"]}) == []
    assert tokens_of(None) == tokens_of({"content": None}) == tokens_of({"content": []}) == []


def test_the_tokens_of_a_text_completion() -> None:
    found = tokens_of(
        {"tokens": ["a", "b"], "token_logprobs": [None, -0.5], "top_logprobs": [None, {"b": -0.5, "c": -1.0}]}
    )
    assert found == [Token(-0.5, math.exp(-0.5) - math.exp(-1.0))]


def test_logprobs_are_taken_out_and_nothing_else() -> None:
    choice = {"index": 0, "message": {"content": "Yes"}, "finish_reason": "stop", "more": 1}
    said = {"id": "x", "odd": [1, {"b": None}], "choices": [choice]}
    body = json.dumps({**said, "choices": [{**choice, "logprobs": {"content": SURE}}]}).encode()
    stripped = without_logprobs(Answer(body, decode_answer(body)))
    found = json.loads(stripped.body)
    assert found["choices"][0].pop("logprobs") is None
    assert found == said
    assert stripped.completion.choices[0].logprobs is None


def test_curves_are_read_anew_when_the_folder_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.escalating.confidence._LOOK_S", 0.0)
    curves = Curves(tmp_path)
    assert curves.of("a/b:c") is None
    path = write(tmp_path, curve("a/b:c"))
    (path.parent / "broken.json").write_text("{")
    found = curves.of("a/b:c")
    assert found is not None
    assert found.probability([Token(-0.01, 0.9)]) == pytest.approx(1 / (1 + math.exp(-(4 - 0.033))))
    assert found.probability([Token(-0.5, 0), Token(-1.5, 0)]) == pytest.approx(1 / (1 + math.exp(-(4 - 3.3))))
    path.unlink()
    assert curves.of("a/b:c") is None


async def low_confidence(house: Tiered, **body: Any) -> tuple[str | None, Any]:
    answer = await house.door.chat("auto", **body)
    assert answer.status_code == 200, answer.text
    said = events(answer.text) if body.get("stream") else answer.json()
    return answer.headers.get("x-tierline-escalated"), said


async def test_an_answer_that_is_unsure_goes_up_and_one_that_is_sure_does_not(tmp_path: Path) -> None:
    write(tmp_path / "var", curve())
    async with tiered(tmp_path, BY_CURVE) as house:
        for logprobs, escalated in ((SURE, None), (UNSURE, "small>medium;low_confidence")):
            house.says("small", "Yes", logprobs=logprobs, deltas=[{"content": "Yes"}])
            found, said = await low_confidence(house)
            assert found == escalated
            assert "top_logprobs" not in json.dumps(said)
            found, said = await low_confidence(house, stream=True)
            assert found == escalated
            assert "top_logprobs" not in json.dumps(said)
        asked = msgspec.json.decode(house.servers["small"].records[-1].body)
        assert (asked["logprobs"], asked["top_logprobs"]) == (True, 2)
        rows = await house.door.rows()
        assert [row["outcome"] for row in rows if row["tier"] == "small"] == ["success"] * 2 + ["escalated"] * 2


async def test_a_client_that_asks_for_logprobs_gets_them(tmp_path: Path) -> None:
    write(tmp_path / "var", curve())
    async with tiered(tmp_path, BY_CURVE) as house:
        house.says("small", "Yes", logprobs=SURE)
        _, said = await low_confidence(house, logprobs=True, top_logprobs=5)
        assert said["choices"][0]["logprobs"]["content"] == SURE
        assert msgspec.json.decode(house.servers["small"].records[-1].body)["top_logprobs"] == 5


async def test_a_raw_threshold_needs_no_curve(tmp_path: Path) -> None:
    async with tiered(tmp_path, "escalate: {when: [low_confidence], mean_logprob: -1.0}\n") as house:
        house.says("small", "Yes", logprobs=UNSURE)
        assert (await low_confidence(house))[0] == "small>medium;low_confidence"
        house.says("small", "Yes", logprobs=None)  # the server says none: nothing is known against it
        assert (await low_confidence(house))[0] is None


async def test_models_without_the_capability_are_not_asked(tmp_path: Path) -> None:
    models = {"small": {"capabilities": ["tools"]}}
    async with tiered(tmp_path, "escalate: {when: [low_confidence], mean_logprob: -1.0}\n", models=models) as house:
        house.says("small", "Yes")
        assert (await low_confidence(house))[0] is None
        assert "logprobs" not in msgspec.json.decode(house.servers["small"].records[-1].body)


async def test_a_policy_that_needs_a_curve_is_refused_without_one_and_taken_with_it(tmp_path: Path) -> None:
    async with tiered(tmp_path, "") as house:
        services = house.door.services
        house.door.write_policy(f"version: 1\nname: default\nowner: tests\nroutes: [{{tier: small}}]\n{BY_CURVE}")
        services.policies.reload()
        (problem,) = services.policies.problems
        assert "'s' has none" in problem.message
        write(tmp_path / "var", curve("s"))
        house.door.write_policy(f"version: 1\nname: default\nowner: us\nroutes: [{{tier: small}}]\n{BY_CURVE}")
        services.policies.reload()
        assert not services.policies.problems
        assert services.policies.current.named("default").document.owner == "us"


# Calibration.


def test_answers_are_compared_as_people_would() -> None:
    assert is_right(" Positive.\n", ["positive"], "exact")
    assert is_right("“POSITIVE”", ["negative", "positive"], "exact")
    assert not is_right("It is positive", ["positive"], "exact")
    assert is_right("It is positive.", ["positive"], "contains")
    assert not is_right("unpositive", ["positive"], "contains")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{"], "line 1"),
        (['{"prompt": "x"}'], "expected"),
        (['{"expected": "x"}'], "line 1"),
        (['{"prompt": "x", "expected": " "}'], "line 1"),
        (['{"prompt": "x", "expected": "y"}'] * 3, "3 examples"),
    ],
)
def test_files_that_measure_nothing(lines: list[str], words: str) -> None:
    with pytest.raises(InvalidExamples, match=words):
        read(lines)


def test_a_curve_is_fitted_to_what_was_observed() -> None:
    """Answers whose chance of being right is known: the curve finds it, where the bare probability does not."""
    random = np.random.default_rng(3)
    logprobs = -random.exponential(0.6, 2000)
    chance = 1 / (1 + np.exp(-(1.5 + 4 * logprobs)))
    right = random.random(2000) < chance
    observed = [Observed(float(x), float(np.exp(x)), bool(y)) for x, y in zip(logprobs, right, strict=True)]
    found = measure("m", observed)
    curve = found.curve
    assert curve.ece_before > 0.15
    assert curve.ece_after < 0.03
    tokens = [Token(-0.5, math.exp(-0.5))]
    assert curve.probability(tokens) == pytest.approx(1 / (1 + math.exp(0.5)), abs=0.1)
    shares = [row["pass"] for row in found.kept]
    assert shares == sorted(shares, reverse=True)  # type: ignore[type-var]
    with pytest.raises(InvalidExamples, match="right"):
        measure("m", [Observed(-0.1, 0.5, True)] * 60)
    wrong = Observed(-0.1, 0.5, False, "It is\npositive. " + "So " * 100, ("positive", "good"))
    with pytest.raises(InvalidExamples) as caught:
        measure("m", [*[Observed(-0.1, 0.5, True, "bad", ("bad",))] * 4, *[wrong] * 60])
    said, *samples = str(caught.value).split("\n")
    assert "'--match exact', which is the default" in said
    assert len(samples) == 3
    assert samples[0].startswith("  expected 'positive' or 'good', got 'It is\\npositive. So ")
    assert len(samples[0]) < 130


def test_many_answers_bend_the_curve_to_what_was_observed() -> None:
    """A chance that steps from one level to another, which no logistic curve does."""
    random = np.random.default_rng(5)
    logprobs = -random.uniform(0, 2, 1500)
    right = random.random(1500) < np.where(logprobs > -1, 0.9, 0.3)
    observed = [Observed(float(x), 0.0, bool(y)) for x, y in zip(logprobs, right, strict=True)]
    many, few = measure("m", observed), measure("m", observed[:190])
    assert many.curve.ece_after < 0.05
    assert not few.curve.knots
    for logprob, chance in ((-0.1, 0.9), (-0.8, 0.9), (-1.2, 0.3), (-1.9, 0.3)):
        assert many.curve.probability([Token(logprob, 0.0)]) == pytest.approx(chance, abs=0.1)
    heights = [many.curve.probability([Token(-x / 50, 0.0)]) for x in range(120)]
    assert heights == sorted(heights, reverse=True)


def test_the_calibration_error_is_the_textbooks() -> None:
    p, y = np.array([0.95, 0.95, 0.15, 0.15]), np.array([1.0, 0.0, 0.0, 0.0])
    assert calibration_error(p, y) == pytest.approx(0.5 * 0.45 + 0.5 * 0.15)


async def test_a_model_is_measured_through_the_gateway(tmp_path: Path) -> None:
    async with tiered(tmp_path, "") as house:
        house.says("small", "Yes.", logprobs=SURE)
        lines = [json.dumps({"prompt": f"{i}?", "expected": "yes" if i % 3 else ["no", "never"]}) for i in range(60)]
        door = house.door
        observed = await calibrating.observe(
            door.url, door.token, "s", read(lines), match="exact", max_tokens=5, concurrency=8
        )
        assert sum(item.right for item in observed) == 40
        assert (observed[0].logprob, observed[0].margin) == features(tokens_of({"content": SURE}))
        asked = msgspec.json.decode(house.servers["small"].records[-1].body)
        assert (asked["temperature"], asked["max_tokens"], asked["top_logprobs"]) == (0, 5, 2)
        with pytest.raises(InvalidExamples, match="status 404"):
            await calibrating.observe(
                door.url, door.token, "x", read(lines), match="exact", max_tokens=5, concurrency=8
            )


async def test_the_command_writes_the_curve_and_says_what_a_threshold_does(tmp_path: Path) -> None:
    async with tiered(tmp_path, "") as house:
        sure = {"token": "Yes", "logprob": -0.01, "top_logprobs": [{"token": "No", "logprob": -5.0}]}
        house.says("small", "Yes.", logprobs=[sure])
        file = tmp_path / "labelled.jsonl"
        lines = [{"prompt": f"{i}?", "expected": "yes" if i % 3 else "no"} for i in range(60)]
        file.write_text("\n".join(map(json.dumps, lines)))
        words = ["tiers", "calibrate", "--file", str(file), "--model", "s", "--url", house.door.url, "--json"]
        words += ["--config", str(tmp_path / "tierline.yaml")]
        done = await command(*words, "--dry-run", key=house.door.token)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["file"] is None
        assert not (tmp_path / "var" / "confidence").exists()
        done = await command(*words, key=house.door.token)
        found = json.loads(done.stdout)["curve"]
        assert (found["examples"], found["right"]) == (60, 40)
        kept = Curves(tmp_path / "var").of("s")
        assert kept is not None
        assert kept.probability([Token(-0.01, 0.9)]) == pytest.approx(2 / 3, abs=0.05)
        for wrong, code, what in (
            (["--model", "z"], 2, "there is no model 'z'"),
            (["--match", "roughly"], 2, "exact or contains"),
            (["--url", "http://127.0.0.1:9"], 1, "cannot be asked"),
        ):
            done = await command(*words, *wrong, key=house.door.token)
            assert (done.returncode, what in done.stderr) == (code, True), done.stderr


async def command(*words: str, key: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "gateway.cli", *words]
    environment = {**os.environ, "TIERLINE_API_KEY": key}
    return await asyncio.to_thread(
        subprocess.run, program, capture_output=True, text=True, env=environment, check=False, timeout=120
    )
