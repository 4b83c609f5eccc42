"""Between a step's plan and its results the host waits for nothing: neither to prepare it nor to begin its draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.gpu.tape import TapeRecorder
from engine.inputs import StepInputs
from engine.types import AWAITED, Draw, SamplingParams, StepPlan
from tests.engine.fakes import VOCAB
from tests.engine.models import row, write_model
from tests.engine.no_waiting import WaitsForDevice, no_waiting
from tests.engine.test_kernel_engine import triton_runner

VALUES = torch.arange(4.0)
WAITING: dict[str, Callable[[], object]] = {
    "item": VALUES[0].item,
    "float": lambda: float(VALUES[0]),
    "bool": lambda: bool(VALUES.any()),
    "tolist": VALUES.tolist,
    "numpy": VALUES.numpy,
    "cpu": VALUES.cpu,
    "to": lambda: VALUES.to(torch.device("cpu")),
    "tensor": lambda: torch.tensor([1], device="cpu"),
    "mask": lambda: VALUES[VALUES > 1],
    "assigned mask": lambda: VALUES.clone().__setitem__(VALUES > 1, 0.0),
    "list": lambda: VALUES[[0, 1]],
    "array": lambda: VALUES[np.array([0, 1])],
    "nonzero": VALUES.nonzero,
    "where": lambda: torch.where(VALUES > 1),
    "unique": VALUES.unique,
}


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_refused(name: str) -> None:
    WAITING[name]()
    with no_waiting(), pytest.raises(WaitsForDevice):
        WAITING[name]()


def test_what_does_not_wait_is_let_through() -> None:
    with no_waiting():
        places = VALUES.argsort()
        (VALUES[places] + VALUES[1:3].sum()).masked_fill_(VALUES > 1, 0.0)[0] = 3.0


class Everything:
    """A grammar that allows all."""

    def fill(self, drafts, out) -> int:
        out[:] = -1
        return 1


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1, top_p=0.9, min_p=0.01, logprobs=2),
    SamplingParams(seed=2, typical_p=0.7, top_k=9, repetition_penalty=1.2, frequency_penalty=0.1),
    SamplingParams(seed=3, bad_words=((4,),), logit_bias={5: 1.0}, min_tokens=9),
]


@pytest.mark.parametrize("is_recorded", [False, True], ids=["kernel by kernel", "recorded"])
def test_steps_begin_without_waiting(tmp_path: Path, is_recorded: bool) -> None:
    """Prompts beside each other, with siblings, a grammar and a copied page; then rows whose tokens nobody has seen."""
    assert VOCAB > 320
    write_model(tmp_path / "tiny.gguf")
    runner = triton_runner(tmp_path / "tiny.gguf")
    if is_recorded:
        runner.record(TapeRecorder(), most_tokens=16)
    else:
        runner._inputs = StepInputs(runner.attention.config, staged=True)  # as on a GPU
    texts = [[7, 8, 9 + i] for i in range(len(PARAMS))]
    rows = [
        row(text, [i + 1], request_id=i + 1, params=p) for i, (text, p) in enumerate(zip(texts, PARAMS, strict=True))
    ]
    rows[0].draws = (Draw(9, SamplingParams(seed=4)),)
    rows[1].grammar = Everything()
    with no_waiting():
        first = runner.launch(StepPlan(rows, copies=[(8, 9)]))
        first.draw()
    for text in texts:
        text.append(AWAITED)
    more = [
        row(text, [i + 1], start=3, request_id=i + 1, params=p)
        for i, (text, p) in enumerate(zip(texts, PARAMS, strict=True))
    ]
    with no_waiting():
        second = runner.launch(StepPlan(more))
    drawn = [result.token_id for result in first.results()]
    for text, token in zip(texts, drawn, strict=True):
        assert token is not None
        text[-1] = token
    with no_waiting():
        second.draw()
    found = second.results()
    assert all(result.error is None for result in found)
    again = [
        row(text, [i + 11], request_id=i + 1, params=p, num_prompt_tokens=3)
        for i, (text, p) in enumerate(zip(texts, PARAMS, strict=True))
    ]
    for one, its in zip(runner.execute(StepPlan(again)), found, strict=True):
        assert one.token_ids == its.token_ids, "with tokens that the host knows it is the same"
