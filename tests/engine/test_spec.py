"""The declarative description of models: what it refuses, and what it says of parameters and rotary tables."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from engine.models.rope import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)
from engine.models.rotary import rotary_table
from engine.models.spec import LayerSpec, ModelSpec, MoeSpec

PLAIN = RopeSpec(10_000.0, 16)
SPEC = ModelSpec(
    architecture="llama",
    layers=(LayerSpec(PLAIN), LayerSpec(PLAIN, window=4)),
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=100,
    max_position=128,
    norm_eps=1e-5,
    tied_embeddings=True,
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_kv_heads": 3}, "4 heads cannot share 3"),
        ({"layers": ()}, "every size"),
        ({"hidden_size": 0}, "every size"),
        ({"layers": (LayerSpec(RopeSpec(1e4, 18)),)}, "wider than head_dim 16"),
        ({"layers": (LayerSpec(PLAIN, window=-1),)}, "window"),
        ({"layers": (LayerSpec(PLAIN, experts=True),)}, "moe"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(SPEC, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "scaling",
    [
        FactorScaling((1.0,) * 7),
        FactorScaling((1.0,) * 7 + (0.0,)),
        LongRopeScaling((1.0,) * 8, (1.0,) * 9, 64, 1.0),
        LinearScaling(0.0),
        YarnScaling(-1.0, 64, 1.0),
    ],
)
def test_scalings_that_do_not_fit_are_refused(scaling: RopeScaling) -> None:
    with pytest.raises(ValueError, match="8 positive factors"):
        RopeSpec(10_000.0, 16, scaling)


def test_odd_and_empty_rotary_embeddings_are_refused() -> None:
    for rotary_dim in (0, 15):
        with pytest.raises(ValueError, match="even and positive"):
            RopeSpec(10_000.0, rotary_dim)
    with pytest.raises(ValueError, match="theta"):
        RopeSpec(0.0, 16)


def test_more_experts_than_there_are_cannot_be_picked() -> None:
    with pytest.raises(ValueError, match="no mixture of experts"):
        MoeSpec(num_experts=4, top_k=5, intermediate_size=8, renormalise=True)


def test_ropes_are_told_once() -> None:
    local = RopeSpec(100.0, 16)
    spec = dataclasses.replace(SPEC, layers=(LayerSpec(local), LayerSpec(None), LayerSpec(PLAIN), LayerSpec(local)))
    assert spec.ropes == (local, PLAIN)


def test_scaled_angles() -> None:
    """Position p of a linearly scaled table is position p / factor of a plain one; LongRoPE chooses by the context."""
    plain = rotary_table(PLAIN, 40)
    assert torch.equal(plain[0], torch.cat([torch.ones(8), torch.zeros(8)]))
    assert math.isclose(float(plain[3, 0]), math.cos(3), rel_tol=1e-6)
    linear = rotary_table(RopeSpec(10_000.0, 16, LinearScaling(4.0)), 160)
    assert torch.allclose(linear[::4], plain, atol=1e-6)
    longrope = RopeSpec(10_000.0, 16, LongRopeScaling((1.0,) * 8, (2.0,) * 8, 64, 3.0))
    assert torch.allclose(rotary_table(longrope, 64)[:40], 3 * plain, atol=1e-6)
    assert torch.allclose(rotary_table(longrope, 80)[:80:2], 3 * plain, atol=1e-6)


def test_dynamic_scaling_begins_beyond_the_trained_length() -> None:
    rope = RopeSpec(10_000.0, 16, DynamicScaling(4.0, 64))
    assert torch.equal(rotary_table(rope, 64), rotary_table(PLAIN, 64))
    stretched, plain = rotary_table(rope, 256), rotary_table(PLAIN, 256)
    assert torch.equal(stretched[:, 0], plain[:, 0])  # the fastest pair turns as ever
    slowest = torch.atan2(stretched[255, 15], stretched[255, 7])
    # factor * 256 / 64 - (factor - 1) = 13 times the base's power that the last pair has
    assert math.isclose(float(slowest), 255 / (10_000.0 ** (7 / 8) * 13.0), rel_tol=1e-3)
