"""Quantised folders: every layout read value by value as its definition says, and as the packages that write it do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.layers.linear import LinearPolicy, ReorderedLinear, build_linear
from engine.loader.errors import ModelFileError
from engine.loader.hf_weights import HfWeights
from engine.loader.safetensors import SINGLE_FILE, Safetensors
from engine.quant.fp8 import E4M3
from engine.quant.int4 import Int4Matrix
from engine.quant.matrix import AFFINE_BITS
from engine.quant.words import AWQ_ORDER, pack_words, to_awq, to_gptq, unpack_words

ROWS, COLUMNS, GROUP = 24, 128, 32
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}


def folder(path: Path, tensors: dict[str, torch.Tensor], quantization: object | None = None) -> HfWeights:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / SINGLE_FILE)
    return HfWeights(Safetensors(path), {} if quantization is None else {"quantization_config": quantization})


def random_int4(seed: int = 0, *, symmetric: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q `[rows, columns]`, zeros and float16 scales `[rows, groups]`."""
    generator = np.random.default_rng(seed)
    groups = (ROWS, COLUMNS // GROUP)
    q = generator.integers(0, 16, (ROWS, COLUMNS)).astype(np.uint8)
    zeros = np.full(groups, 8, np.uint8) if symmetric else generator.integers(0, 16, groups).astype(np.uint8)
    return q, zeros, generator.uniform(0.001, 0.02, groups).astype(np.float16)


def weights_of(q: np.ndarray, zeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray) -> np.ndarray:
    """The definition, element by element, in float64."""
    out = np.empty(q.shape)
    for row in range(len(q)):
        for column, group in enumerate(g_idx):
            out[row, column] = (int(q[row, column]) - int(zeros[row, group])) * float(scales[row, group])
    return out.astype(np.float32)


def word(nibbles: list[int]) -> int:
    """Eight four-bit numbers, the first one lowest, as a signed 32-bit integer."""
    value = sum(int(nibble) << 4 * at for at, nibble in enumerate(nibbles))
    return value - (1 << 32) if value >= 1 << 31 else value


def words_along(values: np.ndarray, axis: int, order: list[int] | None = None) -> torch.Tensor:
    """Pack eight neighbours along `axis`, taken in `order`."""
    moved = np.moveaxis(values, axis, -1)
    eights = moved.reshape(*moved.shape[:-1], -1, 8)[..., order or list(range(8))]
    packed = np.array([word(list(eight)) for eight in eights.reshape(-1, 8)], dtype=np.int32)
    return torch.from_numpy(np.moveaxis(packed.reshape(eights.shape[:-1]), -1, axis).copy())


def awq_tensors(q: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> dict[str, torch.Tensor]:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        "m.qweight": words_along(q.T, 1, order),
        "m.qzeros": words_along(zeros.T, 1, order),
        "m.scales": torch.from_numpy(scales.T.copy()),
    }


def gptq_tensors(
    q: np.ndarray, zeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray | None, *, less: int
) -> dict[str, torch.Tensor]:
    tensors = {
        "m.qweight": words_along(q.T, 0),
        "m.qzeros": words_along((zeros.T.astype(int) - less) % 16, 1),
        "m.scales": torch.from_numpy(scales.T.copy()),
    }
    return tensors if g_idx is None else tensors | {"m.g_idx": torch.from_numpy(g_idx.astype(np.int32))}


PLAIN_GROUPS = np.arange(COLUMNS) // GROUP


def test_words() -> None:
    values = np.random.default_rng(0).integers(0, 16, (5, 24)).astype(np.uint8)
    assert np.array_equal(pack_words(values), words_along(values, 1).numpy())
    assert np.array_equal(unpack_words(pack_words(values)), values)
    assert sorted(AWQ_ORDER) == list(range(8))


def test_awq(tmp_path: Path) -> None:
    q, zeros, scales = random_int4()
    weights = folder(tmp_path, awq_tensors(q, zeros, scales), AWQ)
    assert "m.weight" in weights
    info, matrix = weights.info("m.weight"), weights.tensor("m.weight", (ROWS, COLUMNS))
    assert (info.shape, info.encoding) == ((ROWS, COLUMNS), "AWQ") == (matrix.shape, matrix.encoding)
    want = weights_of(q, zeros, scales, PLAIN_GROUPS)
    assert np.array_equal(matrix.dequantize(), want)
    assert np.array_equal(matrix.rows(3, 9).dequantize(), want[3:9])
    assert np.array_equal(matrix.take_rows(np.array([5, 1, 20])).dequantize(), want[[5, 1, 20]])
    assert isinstance(matrix, Int4Matrix)
    for name, array in zip(("m.qweight", "m.qzeros", "m.scales"), to_awq(matrix), strict=True):
        assert np.array_equal(array, weights.files.array(name)), name


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act-order"])
def test_gptq(tmp_path: Path, version: str, act_order: bool) -> None:
    q, zeros, scales = random_int4()
    g_idx = np.random.default_rng(1).permutation(PLAIN_GROUPS) if act_order else PLAIN_GROUPS
    less = version == "gptq"
    tensors = gptq_tensors(q, zeros, scales, g_idx, less=less)
    weights = folder(tmp_path, tensors, GPTQ | {"checkpoint_format": version})
    matrix = weights.tensor("m.weight", (ROWS, COLUMNS))
    assert matrix.encoding == weights.info("m.weight").encoding == ("GPTQ_ORDERED" if act_order else "GPTQ")
    want = weights_of(q, zeros, scales, g_idx)
    assert np.array_equal(matrix.dequantize(), want)
    assert np.array_equal(matrix.take_rows(np.array([7, 0])).dequantize(), want[[7, 0]])
    assert isinstance(matrix, Int4Matrix)
    written = zip(("m.qweight", "m.qzeros", "m.scales", "m.g_idx"), to_gptq(matrix, zeros_less_one=less), strict=True)
    for name, array in written:
        assert np.array_equal(array, weights.files.array(name)), name


@pytest.mark.parametrize("stored", [7, 8])
@pytest.mark.parametrize("declared", ["gptq", "gptq_v2", None])
def test_symmetric_zeros_tell_their_version_themselves(tmp_path: Path, stored: int, declared: str | None) -> None:
    """Some tools write version 2 and call it 1."""
    q, zeros, scales = random_int4(symmetric=True)
    tensors = gptq_tensors(q, zeros, scales, None, less=8 - stored)
    weights = folder(tmp_path, tensors, GPTQ | {"sym": True, "checkpoint_format": declared})
    assert np.array_equal(weights.tensor("m.weight").dequantize(), weights_of(q, zeros, scales, PLAIN_GROUPS))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_compressed_tensors_of_four_bits(tmp_path: Path, symmetric: bool, strategy: str) -> None:
    q, zeros, scales = random_int4(symmetric=symmetric)
    if strategy == "channel":
        zeros, scales = zeros[:, :1], scales[:, :1]
    args = QuantizationArgs(
        num_bits=4, symmetric=symmetric, strategy=strategy, group_size=GROUP if strategy == "group" else None
    )
    state = {
        "weight": torch.from_numpy(
            weights_of(q, zeros, scales, PLAIN_GROUPS if strategy == "group" else np.zeros(COLUMNS, dtype=int))
        ),
        "weight_scale": torch.from_numpy(scales.astype(np.float32)),
        "weight_zero_point": torch.from_numpy(zeros.astype(np.int8) - np.int8(8)),
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    packed = PackedQuantizationCompressor.compress(state, scheme)
    want = PackedQuantizationCompressor.decompress(packed, scheme)["weight"].float().numpy()
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json")}},
    }
    weights = folder(tmp_path, {f"m.{name}": tensor for name, tensor in packed.items()}, config)
    got = weights.tensor("m.weight", (ROWS, COLUMNS)).dequantize()
    assert np.allclose(got, want, rtol=1e-6, atol=0)
    assert np.allclose(got, state["weight"].numpy(), rtol=1e-6, atol=0)


def test_every_code_of_e4m3() -> None:
    codes = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(E4M3, want, equal_nan=True)


@pytest.mark.parametrize("scheme", ["tensor", "scalar", "channel", "block", "uneven block"])
def test_fp8(tmp_path: Path, scheme: str) -> None:
    rows, columns = (200, 192) if scheme == "uneven block" else (64, 192)
    generator = torch.Generator().manual_seed(0)
    codes = (100 * torch.randn(rows, columns, generator=generator)).to(torch.float8_e4m3fn)
    side = 128 if scheme == "uneven block" else 32
    shape = {"tensor": (1,), "scalar": (), "channel": (rows, 1)}.get(scheme, (-(-rows // side), -(-columns // side)))
    scale = torch.rand(shape, generator=generator) * 0.01
    block = scheme.endswith("block")
    name = "m.weight_scale_inv" if block else "m.weight_scale"
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"} | (
        {"weight_block_size": [side, side]} if block else {}
    )
    weights = folder(tmp_path, {"m.weight": codes, name: scale}, config)
    spread = scale
    if block:
        spread = scale.repeat_interleave(side, 0)[:rows].repeat_interleave(side, 1)[:, :columns]
    want = (codes.float() * spread).numpy()
    matrix = weights.tensor("m.weight", (rows, columns))
    assert matrix.encoding == weights.info("m.weight").encoding == "F8_E4M3"
    assert np.array_equal(matrix.dequantize(), want)
    assert np.array_equal(matrix.rows(33, 41).dequantize(), want[33:41])
    assert np.array_equal(matrix.take_rows(np.array([40, 2])).dequantize(), want[[40, 2]])


def test_fp8_of_compressed_tensors(tmp_path: Path) -> None:
    codes = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scale = torch.rand(16, 1, generator=torch.Generator().manual_seed(1)).bfloat16()
    scheme = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
    }
    weights = folder(tmp_path, {"m.weight": codes, "m.weight_scale": scale}, config)
    assert np.array_equal(weights.tensor("m.weight").dequantize(), (codes.float() * scale.float()).numpy())


def test_mxfp4(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 130, (3, 10, 4), dtype=torch.uint8, generator=generator)
    tensors = {"m.gate_up_proj_blocks": blocks, "m.gate_up_proj_scales": scales}
    weights = folder(tmp_path, tensors, {"quant_method": "mxfp4"})
    want = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, columns, rows]
    matrix = weights.tensor("m.gate_up_proj", (3, 10, 128))
    assert matrix.encoding == weights.info("m.gate_up_proj").encoding == "MXFP4"
    assert np.array_equal(matrix.dequantize(), want.transpose(1, 2).numpy())
    one = weights.expert("m.gate_up_proj", 1, (3, 10, 128))
    assert one.shape == (10, 128)
    assert np.array_equal(one.dequantize(), matrix.dequantize()[1])
    with pytest.raises(IndexError):
        weights.expert("m.gate_up_proj", 3, (3, 10, 128))
    with pytest.raises(ModelFileError, match="has shape"):
        weights.expert("m.gate_up_proj", 1, (3, 10, 64))
    stacked = torch.randn(3, 4, 32, generator=generator)
    plain = folder(tmp_path, {"e": stacked}).expert("e", 2, (3, 4, 32))
    assert np.array_equal(plain.dequantize(), stacked[2].numpy())


def test_plain_weights_beside_quantised_ones(tmp_path: Path) -> None:
    head = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors = awq_tensors(*random_int4()) | {"lm_head.weight": head, "norm.weight": head[0].clone()}
    weights = folder(tmp_path, tensors, AWQ)
    assert weights.info("lm_head.weight").encoding == "BF16"
    assert np.array_equal(weights.tensor("lm_head.weight", (8, 32)).dequantize(), head.float().numpy())
    assert np.array_equal(weights.vector("norm.weight", 32), head[0].float().numpy())
    assert "other.weight" not in weights


def test_products_with_quantised_weights(tmp_path: Path) -> None:
    """Packed on the CPU, in one product where the order of columns is one; as near as eight-bit rounding leaves it."""
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(0))
    policy = LinearPolicy(torch.device("cpu"), torch.float32, packed_rows=8, dense=False)
    g_idx = np.random.default_rng(1).permutation(PLAIN_GROUPS)
    makers: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
        "AWQ": (awq_tensors(*random_int4()), AWQ),
        "GPTQ": (gptq_tensors(*random_int4(), None, less=1), GPTQ),
        "GPTQ_ORDERED": (gptq_tensors(*random_int4(), g_idx, less=1), GPTQ),
    }
    codes = (100 * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(2))).to(torch.float8_e4m3fn)
    makers["F8_E4M3"] = {"m.weight": codes, "m.weight_scale": torch.tensor(0.01)}, {"quant_method": "fp8"}
    for encoding, (tensors, config) in makers.items():
        weights = folder(tmp_path, tensors, config)
        matrix = weights.tensor("m.weight")
        assert matrix.encoding == encoding
        assert encoding in AFFINE_BITS
        twice = np.concatenate([matrix.dequantize()] * 2)
        linear = build_linear([matrix, matrix], policy)
        assert isinstance(linear, ReorderedLinear) == (encoding == "GPTQ_ORDERED")
        want = x @ torch.from_numpy(twice).T
        error = float((linear(x) - want).abs().max() / want.abs().max())
        assert error < (0.01 if encoding == "F8_E4M3" else 5e-4), encoding
    other = folder(tmp_path, gptq_tensors(*random_int4(), g_idx[::-1].copy(), less=1), GPTQ).tensor("m.weight")
    ordered = folder(tmp_path, gptq_tensors(*random_int4(), g_idx, less=1), GPTQ).tensor("m.weight")
    both = build_linear([ordered, other], policy)  # two orders: decoded
    want = x @ torch.from_numpy(np.concatenate([ordered.dequantize(), other.dequantize()])).T
    assert torch.allclose(both(x), want, atol=1e-4)


def test_eight_bits_of_fp8_cost_little_beside_what_fp8_costs() -> None:
    """Rounding e4m3 numbers to eight bits per 32 columns adds a few per cent to the error that they have already."""
    from engine.quant.fp8 import scaled_fp8

    true = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    scale = true.abs().max() / 448
    codes = (true / scale).to(torch.float8_e4m3fn)
    matrix = scaled_fp8(codes.view(torch.uint8).numpy(), scale.reshape(1, 1).numpy(), (256, 512))
    blocks = matrix.affine()
    rounded = (blocks.values() * blocks.scale[..., None] + blocks.minimum[..., None]).reshape(256, 512)
    before, after = (np.sqrt(np.mean((found - true.numpy()) ** 2)) for found in (matrix.dequantize(), rounded))
    assert after < 1.04 * before


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported"),
        ({"quant_method": "exl3"}, "Use one of awq, gptq"),
        ([], "no object"),
        (AWQ | {"bits": 8}, "awq with bits 8"),
        (AWQ | {"version": "gemv"}, "awq with version 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point False"),
        (GPTQ | {"bits": 3}, "gptq with bits 3"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'marlin' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "not two sizes"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "compressed-tensors"}, "no scheme"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}}},
            "int of 8 bits",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}, "format": "x"},
            "format 'x'",
        ),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, config: object, problem: str) -> None:
    with pytest.raises(ModelFileError, match=problem):
        folder(tmp_path, {"a": torch.zeros(1)}, config)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    q, zeros, scales = random_int4()
    good = gptq_tensors(q, zeros, scales, PLAIN_GROUPS, less=1)
    uneven = np.zeros(COLUMNS, dtype=np.int32)
    ungrouped = gptq_tensors(q, zeros, scales, None, less=1)
    cases = {
        "does not divide 128 columns": good | {"m.g_idx": torch.from_numpy(uneven)},
        "'m.qzeros' has shape": good | {"m.qzeros": torch.zeros(4, 2, dtype=torch.int32)},
        "groups one of 32": ungrouped | {"m.scales": torch.zeros(8, ROWS)},
        "type I64, not I32": good | {"m.qweight": good["m.qweight"].long()},
        "'m.scales' is missing": {name: tensor for name, tensor in good.items() if name != "m.scales"},
        "'m.qzeros' is missing": {name: tensor for name, tensor in good.items() if name != "m.qzeros"},
    }
    for problem, tensors in cases.items():
        with pytest.raises(ModelFileError, match=problem):
            folder(tmp_path, tensors, GPTQ).tensor("m.weight")
    with pytest.raises(ModelFileError, match=r"'n.weight' is missing"):
        folder(tmp_path, good, GPTQ).tensor("n.weight")
    with pytest.raises(ModelFileError, match=r"has shape \[24, 128\], the configuration asks for \[128, 24\]"):
        folder(tmp_path, good, GPTQ).tensor("m.weight", (COLUMNS, ROWS))
    with pytest.raises(ModelFileError, match=r"stored as awq or gptq, config\.json says nothing of that"):
        folder(tmp_path, good).tensor("m.weight")


def test_damaged_fp8_is_refused(tmp_path: Path) -> None:
    codes = torch.zeros(8, 32).to(torch.float8_e4m3fn)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(ModelFileError, match="its scale is missing"):
        folder(tmp_path, {"m.weight": codes}, config).tensor("m.weight")
    with pytest.raises(ModelFileError, match=r"scales of shape \[2, 1\] where blocks"):
        folder(tmp_path, {"m.weight": codes, "m.weight_scale_inv": torch.ones(2, 1)}, config).tensor("m.weight")
    wrong = {"m.weight": torch.zeros(8, 32).to(torch.float8_e5m2), "m.weight_scale": torch.ones(1)}
    with pytest.raises(ModelFileError, match="type F8_E5M2"):
        folder(tmp_path, wrong, config).tensor("m.weight")
    with pytest.raises(ModelFileError, match=r"config\.json says mxfp4"):
        folder(tmp_path, {"m.weight": codes, "m.weight_scale": torch.ones(1)}, {"quant_method": "mxfp4"}).tensor(
            "m.weight"
        )
