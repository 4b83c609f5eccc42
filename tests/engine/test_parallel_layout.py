"""Who holds what: every head, column, expert, token and layer once, from the files of every encoding, or a refusal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from engine.config import EngineConfig
from engine.layers.linear import LinearPolicy
from engine.layers.mlp import build_mlp
from engine.loader import open_model
from engine.memory import Demand, Storage
from engine.models.spec import LayerSpec, ModelSpec, MoeSpec
from engine.models.tensors import NetworkTensors
from engine.parallel.errors import LayoutError
from engine.parallel.layout import Layout, check_layout, part_of
from engine.parallel.settings import check_settings
from engine.parallel.shards import PartTensors
from engine.quant.blocks import BlockTensor
from engine.quant.fp8 import scaled_fp8
from engine.quant.int4 import pack_int4
from engine.quant.matrix import AFFINE_BITS, WeightMatrix
from engine.transfer import address
from tests.engine.models import write_model

RANDOM = np.random.default_rng(11)
SPEC = ModelSpec(
    architecture="llama",
    layers=(LayerSpec(None),) * 10,
    hidden_size=64,
    intermediate_size=96,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=101,
    max_position=64,
    norm_eps=1e-5,
    tied_embeddings=True,
    moe=MoeSpec(num_experts=6, top_k=2, intermediate_size=32, renormalise=True),
)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (4, 1), (1, 3), (2, 4), (4, 10)])
def test_everything_is_held_once_by_the_ranks_of_a_stage(tensor: int, pipeline: int) -> None:
    layout = Layout(tensor, pipeline)
    parts = [part_of(SPEC, place) for place in layout.places]
    leader = parts[0].place
    assert leader.leads
    assert leader.is_last
    by_stage = [[part for part in parts if part.place.stage == stage] for stage in range(pipeline)]
    assert [layer for stage in by_stage for layer in stage[0].layers] == list(range(10))
    for stage in by_stage:
        for name, count in (("heads", 8), ("inner", 96), ("experts", 6), ("vocabulary", 101)):
            assert [number for part in stage for number in getattr(part, name)] == list(range(count))
        for part in stage:
            assert part.layers == stage[0].layers
            assert {head // 4 for head in part.heads} == set(part.kv_heads)  # a group has four heads
            assert part.place.stage_ranks == range(stage[0].place.rank, stage[0].place.rank + tensor)
            assert part.spec.num_layers == len(part.layers)
    for part in parts:
        if not part.place.is_last:
            assert layout.places[part.place.next_rank].previous_rank == part.place.rank
            assert layout.places[part.place.next_rank].stage == part.place.stage + 1


@pytest.mark.parametrize(
    ("spec", "layout", "message"),
    [
        (SPEC, Layout(3), r"8 attention heads \(2 of keys and values\) .* 3 tensor-parallel ranks: use 1, 2, 4$"),
        (replace(SPEC, intermediate_size=97), Layout(2), "97 columns .*: use 1$"),
        (replace(SPEC, num_heads=12, num_kv_heads=3), Layout(2), "use 1, 3, 6"),
        (replace(SPEC, moe=MoeSpec(3, 2, 32, renormalise=True)), Layout(4), "3 experts .*use 1, 2$"),
        (SPEC, Layout(1, 11), "10 layers cannot be divided into 11 stages"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_can(spec: ModelSpec, layout: Layout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_layout(spec, layout)


def test_a_machine_has_so_many_ranks() -> None:
    with pytest.raises(LayoutError, match="1 to 64 processes"):
        Layout(16, 8)


def _matrix(kind: str) -> WeightMatrix:
    rows, columns = 24, 512
    values = RANDOM.standard_normal((rows, columns), dtype=np.float32)
    match kind:
        case "int4":
            codes = RANDOM.integers(0, 16, (rows, columns), dtype=np.uint8)
            scale, zero = RANDOM.random((rows, 4), dtype=np.float32), RANDOM.integers(0, 16, (rows, 4), dtype=np.uint8)
            return pack_int4(codes, scale, zero, "AWQ")
        case "fp8":
            codes = RANDOM.integers(0, 126, (rows, columns), dtype=np.uint8)
            return scaled_fp8(codes, RANDOM.random((1, 4), dtype=np.float32), (24, 128))
        case "fp8 by row":
            codes = RANDOM.integers(0, 126, (rows, columns), dtype=np.uint8)
            return scaled_fp8(codes, RANDOM.random((24, 1), dtype=np.float32), (1, 512))
    encoding = GGMLQuantizationType[kind]
    return BlockTensor(quantize(values, encoding).view(np.uint8), encoding, values.shape)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q8_0", "int4", "fp8", "fp8 by row"])
def test_columns_are_those_of_the_decoded_matrix(kind: str) -> None:
    matrix = _matrix(kind)
    whole = matrix.dequantize()
    for start, stop in ((0, 256), (128, 384), (256, 512)):
        part = matrix.columns(start, stop)
        np.testing.assert_array_equal(part.dequantize(), whole[:, start:stop])
        if matrix.encoding in AFFINE_BITS:  # 32 columns have one scale, whatever the matrix they are in
            np.testing.assert_array_equal(part.affine().scale, matrix.affine().scale[:, start // 32 : stop // 32])


@pytest.mark.parametrize(("kind", "block"), [("Q4_0", 32), ("int4", 128), ("fp8", 128)])
def test_blocks_with_one_scale_stay_whole(kind: str, block: int) -> None:
    with pytest.raises(ValueError, match=f"columns 16 to 511 of 512 cut a block of {block}"):
        _matrix(kind).columns(16, 512)


def test_columns_with_an_order_stay_together() -> None:
    matrix = replace(_matrix("int4"), order=RANDOM.permutation(512).astype(np.int32))
    with pytest.raises(ValueError, match="act-order"):
        matrix.columns(0, 256)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantised") / "m.gguf"
    write_model(path, encoding=GGMLQuantizationType.Q4_0, sizes={"intermediate_size": 192})
    return path


def test_a_layer_whose_blocks_would_be_cut_is_named(quantised: Path) -> None:
    source = open_model(quantised).tensors()
    cut = replace(part_of(source.spec, Layout(2).places[1]), inner=range(80, 176))
    with pytest.raises(LayoutError, match=r"layer 1 cannot be divided among 2 .* cut a block of 32"):
        PartTensors(source, cut).layer(1)


@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 2)])
def test_the_plan_of_a_part_counts_what_the_part_holds(quantised: Path, layout: Layout) -> None:
    """Rank by rank, the bytes of the decoded matrices: what the headers foretell is what is then taken."""
    model = open_model(quantised)
    storage = Storage(4, 4, keep_dense=True, packed_bytes=None)
    for place in layout.places:
        part = part_of(model.spec, place)
        source = PartTensors(model.tensors(), part)
        headers = list(source.matrices(output=False))
        plan = Demand(part.spec, headers, 64, 16, 4, 64, vocabulary=part.table_rows).plan(storage)
        held = 0
        for layer in source.layers():
            assert isinstance(layer.mlp, NetworkTensors)
            policy = LinearPolicy(torch.device("cpu"), torch.float32, packed_rows=0)
            held += sum(matrix.num_rows * matrix.num_columns * 4 for matrix in (*layer.qkv, layer.attention_output))
            held += build_mlp(layer.mlp, policy, part.spec.activation).num_bytes
        assert plan.dense_bytes == held
        assert plan.embedding_bytes == 4 * 96 * part.table_rows


@pytest.mark.parametrize(
    ("settings", "adapters", "message"),
    [
        ({}, True, "adapters"),
        ({"max_loras": 2}, False, "adapters"),
        ({"kv_host_bytes": 1 << 20}, False, "pages beyond the KV cache"),
        ({"role": "prefill", "kv_listen": "tcp://127.0.0.1:1"}, False, "role"),
        ({"speculative": "eagle3", "draft_model_path": "x"}, False, "eagle3"),
    ],
)
def test_what_does_not_go_with_parts_is_refused(settings: dict[str, Any], adapters: bool, message: str) -> None:
    config = EngineConfig(model_path="m", served_name="m", tensor_parallel=2, **settings)
    with pytest.raises(LayoutError, match=message):
        check_settings(config, SPEC, adapters=adapters)
    alone = EngineConfig(model_path="m", served_name="m", **settings)
    check_settings(alone, SPEC, adapters=adapters)


def test_pages_in_redis_do_not_go_with_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model_path="m", served_name="m", pipeline_parallel=2, speculative="ngram")
    check_settings(config, SPEC, adapters=False)
    monkeypatch.setenv(address.VARIABLE, "redis://localhost")
    monkeypatch.setenv("TIERLINE_PAGE_SEED", "0" * 64)
    with pytest.raises(LayoutError, match="kv_redis_url"):
        check_settings(config, SPEC, adapters=False)
