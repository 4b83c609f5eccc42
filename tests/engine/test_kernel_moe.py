"""The mixture of experts by kernels equals the loop over experts, however tokens are spread over them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from engine.kernels.expert_table import ExpertTile
from engine.kernels.moe_routing import CHUNK, Routing, most_blocks, route_reference, routing_launches
from engine.layers.linear import LinearPolicy
from engine.layers.moe import MixtureOfExperts, build_experts
from engine.layers.moe_triton import FusedExperts, build_fused
from engine.layers.moe_weights import stackable
from engine.layers.ops_torch import TorchOps
from engine.models.spec import Activation, MoeSpec
from engine.models.tensors import ExpertTensors, NetworkTensors
from engine.quant.blocks import BlockTensor
from engine.quant.int4 import Int4Matrix, pack_int4
from tests.engine.kernel_support import assert_close, kernel_device

LOW, TALL = ExpertTile(16, 32, 64, 4, 2), ExpertTile(32, 64, 32, 4, 2)
T = GGMLQuantizationType


def experts(
    count: int, hidden: int, inner: int, kind: GGMLQuantizationType = T.F32, *, bias: bool = False, seed: int = 0
) -> ExpertTensors:
    random = np.random.default_rng(seed)

    def vector(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return random.standard_normal(shape, dtype=np.float32)

    def matrix(rows: int, columns: int) -> BlockTensor:
        values = vector(rows, columns) / np.float32(columns**0.5)
        data = quantize(values, kind) if kind != T.MXFP4 else mxfp4(random, rows, columns)
        return BlockTensor(data.view(np.uint8).reshape(rows, -1), kind, (rows, columns))

    networks = [
        NetworkTensors(
            [matrix(inner, hidden), matrix(inner, hidden)],
            matrix(hidden, inner),
            vector(2 * inner) if bias else None,
            vector(hidden) if bias else None,
        )
        for _ in range(count)
    ]
    return ExpertTensors(vector(count, hidden), vector(count) if bias else None, networks)


def mxfp4(random: np.random.Generator, rows: int, columns: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Random codes, all 16 of them, with exponents around those of weights."""
    blocks = random.integers(0, 256, (rows, columns // 32, 17), dtype=np.uint8)
    blocks[..., 0] = random.integers(121, 126, blocks.shape[:2])
    return blocks


def both(
    tensors: ExpertTensors,
    spec: MoeSpec,
    activation: Activation = Activation.SILU,
    dtype: torch.dtype = torch.float32,
    *,
    packed: bool = False,
) -> tuple[FusedExperts, MixtureOfExperts]:
    """The kernels' mixture with activations of `dtype`, and the plain one in float32 with the weights of `dtype`."""
    device = kernel_device()
    plain = build_experts(tensors, LinearPolicy(torch.device("cpu"), torch.float32, packed_rows=0), spec, activation)
    assert isinstance(plain, MixtureOfExperts)
    policy = LinearPolicy(device, dtype, packed_rows=8 if packed else 0, triton=True)
    router_bias = None if tensors.router_bias is None else torch.from_numpy(tensors.router_bias).to(device)
    router = torch.from_numpy(tensors.router).to(device)
    return build_fused(tensors, router, router_bias, policy, spec, activation), plain


def compare(fused: FusedExperts, plain: MixtureOfExperts, x: torch.Tensor, tile: ExpertTile) -> None:
    actual = fused.run(x.to(kernel_device()), tile)
    assert actual.dtype == x.dtype
    assert_close(actual.cpu(), plain(x.float(), TorchOps()), x.dtype)


def tokens(count: int, hidden: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("count", "top_k", "num_tokens"),
    [(1, 1, 1), (8, 2, 1), (8, 2, 40), (5, 5, 7), (60, 4, 33), (128, 8, 3), (128, 8, 70)],
)
@pytest.mark.parametrize("renormalise", [False, True])
def test_routing_sorts_every_slot_to_its_expert(count: int, top_k: int, num_tokens: int, renormalise: bool) -> None:
    device = kernel_device()
    scores = tokens(num_tokens, count, seed=count + num_tokens) * 3
    block_m = 16
    routing = Routing.empty(num_tokens, top_k, count, block_m, device)
    for launch in routing_launches(scores.to(device), routing, renormalise=renormalise, block_m=block_m):
        launch.run()
    chosen, weights = route_reference(scores, top_k, renormalise=renormalise)
    assert torch.equal(routing.chosen.cpu().long(), chosen)
    torch.testing.assert_close(routing.weights.cpu(), weights, atol=1e-6, rtol=1e-6)
    assert sorted(routing.order.tolist()) == list(range(num_tokens * top_k))
    seen: list[int] = []
    for expert, first, stop in routing.blocks.tolist():
        if first < stop:
            assert stop - first <= block_m
            slots = routing.order[first:stop].tolist()
            assert {int(chosen.flatten()[slot]) for slot in slots} == {expert}
            seen += slots
    assert sorted(seen) == list(range(num_tokens * top_k)), "the blocks hold every slot once"
    assert len(routing.blocks) == most_blocks(num_tokens, top_k, count, block_m)


def test_routing_many_chunks_that_all_want_two_experts() -> None:
    """More chunks than counts are added up at a time, and experts that get everything beside such as get nothing."""
    device, num_tokens = kernel_device(), 20 * CHUNK + 5
    scores = torch.zeros(num_tokens, 16)
    scores[:, 3], scores[:, 11] = 2.0, 1.0
    routing = Routing.empty(num_tokens, 2, 16, 64, device)
    for launch in routing_launches(scores.to(device), routing, renormalise=True, block_m=64):
        launch.run()
    order = routing.order.cpu()
    assert torch.equal(order[:num_tokens] % 2, torch.zeros(num_tokens, dtype=torch.int32))
    assert sorted(order.tolist()) == list(range(2 * num_tokens))
    used = [entry for entry in routing.blocks.tolist() if entry[1] < entry[2]]
    assert [entry[0] for entry in used] == [3] * 11 + [11] * 11
    assert used[10][2] == used[11][1] == num_tokens


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's, under the interpreter
def test_equal_scores_go_to_the_lower_numbers_and_a_nan_stays_one() -> None:
    device = kernel_device()
    scores = torch.zeros(3, 6, device=device)
    scores[1] = float("nan")
    scores[2] = -float("inf")
    scores[2, 4] = 1.0
    routing = Routing.empty(3, 2, 6, 16, device)
    for launch in routing_launches(scores, routing, renormalise=True, block_m=16):
        launch.run()
    assert routing.chosen.tolist() == [[0, 1], [0, 1], [4, 0]]
    assert routing.weights[1].isnan().all()
    assert routing.weights[2].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("activation", Activation, ids=lambda kind: kind.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dense_experts_of_every_kind(activation: Activation, dtype: torch.dtype) -> None:
    """Sizes that no tile divides, biases, experts without tokens."""
    tensors = experts(6, 72, 40, bias=activation is Activation.CLAMPED_SWIGLU)
    fused, plain = both(tensors, MoeSpec(6, 2, 40, renormalise=True), activation, dtype)
    compare(fused, plain, tokens(5, 72, dtype), LOW)


@pytest.mark.parametrize("num_tokens", [1, 16, 37])
@pytest.mark.parametrize("tile", [LOW, TALL], ids=["low", "tall"])
def test_tokens_that_all_want_one_expert(num_tokens: int, tile: ExpertTile) -> None:
    tensors = experts(4, 64, 48)
    tensors = replace(tensors, router_bias=np.array([-50, 50, -50, 0], dtype=np.float32))
    fused, plain = both(tensors, MoeSpec(4, 1, 48, renormalise=False))
    compare(fused, plain, tokens(num_tokens, 64), tile)


@pytest.mark.parametrize("kind", [T.MXFP4, T.Q4_0, T.Q4_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize("tile", [LOW, TALL], ids=["low", "tall"])
def test_packed_experts(kind: GGMLQuantizationType, tile: ExpertTile) -> None:
    tensors = experts(5, 96, 64, kind, bias=True)
    fused, plain = both(tensors, MoeSpec(5, 3, 64, renormalise=True), Activation.CLAMPED_SWIGLU, packed=True)
    assert fused.gate_up.encoding == fused.down.encoding == ("mxfp4" if kind == T.MXFP4 else "int4")
    assert fused.num_bytes < plain.num_bytes / 4
    compare(fused, plain, tokens(9, 96), tile)


def test_packed_experts_in_half_precision() -> None:
    fused, plain = both(
        experts(4, 64, 32, T.Q4_0), MoeSpec(4, 2, 32, renormalise=True), dtype=torch.float16, packed=True
    )
    compare(fused, plain, tokens(6, 64, torch.float16), LOW)


def test_what_stays_within_the_memory_that_was_promised() -> None:
    policy = LinearPolicy(torch.device("cuda"), torch.bfloat16, packed_rows=64, dense=False)
    for kind, expected in ((T.F32, True), (T.MXFP4, True), (T.Q4_0, True), (T.Q8_0, False)):
        assert stackable(experts(2, 64, 32, kind).experts, policy) == expected, kind
    assert stackable(experts(2, 64, 32, T.Q8_0).experts, replace(policy, packed_rows=0))


def test_what_cannot_be_packed_is_decoded() -> None:
    mixed = experts(2, 64, 32, T.Q4_0)
    mixed = replace(mixed, experts=[*experts(1, 64, 32, T.Q8_0).experts, *list(mixed.experts)[1:]])
    fused, plain = both(mixed, MoeSpec(2, 1, 32, renormalise=True), packed=True)
    assert fused.gate_up.encoding == "dense"
    compare(fused, plain, tokens(3, 64), LOW)


def test_scales_beyond_float16_are_refused() -> None:
    def huge(rows: int, columns: int) -> Int4Matrix:
        groups = (rows, columns // 32)
        scale, zero = np.full(groups, 1e5, np.float32), np.full(groups, 8, np.uint8)
        return pack_int4(np.zeros((rows, columns), dtype=np.uint8), scale, zero, "AWQ")

    tensors = replace(experts(1, 64, 32), experts=[NetworkTensors([huge(32, 64), huge(32, 64)], huge(64, 32))])
    with pytest.raises(ValueError, match="beyond float16"):
        both(tensors, MoeSpec(1, 1, 32, renormalise=True), packed=True)


def test_a_row_does_not_depend_on_its_mates() -> None:
    fused, _ = both(experts(8, 64, 32), MoeSpec(8, 2, 32, renormalise=True))
    x = tokens(20, 64).to(kernel_device())
    assert torch.equal(fused.run(x, LOW)[:3], fused.run(x[:3], LOW))


@pytest.mark.parametrize("kind", [T.F32, T.Q4_0], ids=lambda kind: kind.name)
def test_ranks_with_some_experts_each_add_up(kind: GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One, three and two of six experts; what a rank's products do not write, holds NaN."""
    tensors, spec = experts(6, 64, 32, kind, bias=True), MoeSpec(6, 3, 32, renormalise=True)
    whole, plain = both(tensors, spec, packed=True)
    parts = [both(tensors.only(range(first, stop)), spec, packed=True) for first, stop in ((0, 1), (1, 4), (4, 6))]
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **options: poisoned(empty(*a, **options)))
    x = tokens(37, 64)
    for tile in (LOW, TALL):
        sums = [fused.run(x.to(kernel_device()), tile).cpu() for fused, _ in parts]
        for summed, (_, alone) in zip(sums, parts, strict=True):
            assert_close(summed, alone(x, TorchOps()), torch.float32)
        assert_close(sum(sums, torch.zeros_like(x)), plain(x, TorchOps()), torch.float32)
        assert_close(whole.run(x.to(kernel_device()), tile).cpu(), plain(x, TorchOps()), torch.float32)


def poisoned(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.fill_(torch.nan if buffer.is_floating_point() else 2**30)


def test_no_tokens_give_no_rows() -> None:
    fused, _ = both(experts(2, 64, 32), MoeSpec(2, 1, 32, renormalise=True))
    assert fused(tokens(0, 64).to(kernel_device()), TorchOps()).shape == (0, 64)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's, under the interpreter
def test_a_token_that_is_not_finite_spoils_itself_alone() -> None:
    fused, plain = both(experts(4, 64, 32), MoeSpec(4, 2, 32, renormalise=True))
    x = tokens(4, 64)
    x[2, 5] = float("nan")
    out = fused.run(x.to(kernel_device()), LOW).cpu()
    assert out[2].isnan().all()
    x = x[[0, 1, 3]]
    assert_close(out[[0, 1, 3]], plain(x, TorchOps()), torch.float32)
