"""Plans: published sizes, the sums, and that a plan and an engine's own division of memory agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType

from engine.load_runner import load_runner
from engine.loader.errors import ModelFileError
from engine.memory import choose_num_blocks
from engine.parallel.errors import LayoutError
from engine.planning.__main__ import parse_bytes, parse_tokens
from engine.planning.headers import matrices_of, product_parameters
from engine.planning.ledger import Ledger, Workload, make_ledger
from engine.planning.shapes import SHAPES
from engine.planning.source import estimate, find_source
from tests.engine.models import write_model

# Parameters as the model cards or the weights' index files give them.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "llama-2-7b": 6_738_415_616,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "phi-4": 14_659_507_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
KV_PER_TOKEN = {"llama-3.1-8b": 131_072, "llama-2-7b": 524_288, "qwen3-8b": 147_456, "llama-3.1-70b": 327_680}


def ledger(name: str, quantization: str | None = None, **changes: int) -> Ledger:
    options = {"gpu_bytes": 80 * 10**9, "context": 4096, "parallel": 8} | changes
    return make_ledger(find_source(name, quantization), Workload(**options))


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_the_published_sizes(name: str) -> None:
    assert SHAPES[name].num_parameters == PUBLISHED[name]


def test_every_shape_is_checked() -> None:
    assert set(SHAPES) - set(PUBLISHED) == {"gemma-3-27b"}  # its card counts the vision tower, too
    assert 26.9e9 < SHAPES["gemma-3-27b"].num_parameters < 27.1e9
    for spec in SHAPES.values():
        products = sum(matrix.shape[0] * matrix.shape[1] for group in matrices_of(spec) for matrix in group)
        tables = spec.vocab_size * spec.hidden_size * (1 if spec.tied_embeddings else 2)
        # The rest is norms, biases, sinks: well under a thousandth.
        rest = spec.num_parameters - product_parameters(spec) - tables
        assert 0 < rest < 1e-3 * spec.num_parameters
        assert products == product_parameters(spec) + spec.vocab_size * spec.hidden_size


@pytest.mark.parametrize("name", KV_PER_TOKEN)
def test_kv_per_token(name: str) -> None:
    assert ledger(name).kv_bytes_per_token == KV_PER_TOKEN[name]


def test_the_sums_of_a_plan() -> None:
    """Llama 3.1 8B at 32k on 80 GB, by hand."""
    plan = ledger("llama-3.1-8b", context=32_768, parallel=64)
    assert sum(plan.stored_bytes.values()) == 2 * 8_030_261_248
    assert plan.kv_bytes_per_request == 32_768 * 131_072 == plan.kv_bytes_within_windows
    room = plan.precision["bfloat16"]
    # Norms are held in float32, and there are a sine and a cosine for each half of a head.
    tables = 2 * (2 * 32 + 1) * 4096 + 4 * 32_768 * 128
    assert room.weights_bytes == 2 * 8_030_261_248 + tables
    rest = 80 * 10**9 - room.weights_bytes - room.activation_bytes
    assert room.kv_budget_bytes == int(rest * 0.9)
    pages = int(rest * 0.9) // (131_072 * 16) - 1
    assert room.requests == pages // 2048 == 13
    assert not room.fits
    assert room.longest_context == pages // 64 * 16
    assert ledger("llama-3.1-8b", context=13_000, parallel=32).precision["bfloat16"].fits
    # What is not packed takes as much either way, but for the room to decode something.
    assert plan.precision["auto"].weights_bytes == room.weights_bytes
    assert plan.precision["auto"].activation_bytes == room.activation_bytes + (64 << 20)


def test_short_keys_and_values_take_half_and_their_scales() -> None:
    plain, short = ledger("llama-3.1-8b"), ledger("llama-3.1-8b", kv_fp8=True)
    assert short.kv_bytes_per_token == 2 * 32 * 8 * (128 + 4)
    assert short.precision["auto"].kv_budget_bytes == plain.precision["auto"].kv_budget_bytes
    gain = short.precision["auto"].kv_capacity_tokens / plain.precision["auto"].kv_capacity_tokens
    assert gain == pytest.approx(256 / 132, rel=1e-3)


def test_ranks_hold_a_part_each() -> None:
    one, four = ledger("llama-3.1-70b"), ledger("llama-3.1-70b", tensor_parallel=4)
    assert four.kv_bytes_per_token == one.kv_bytes_per_token
    alone, part = one.precision["bfloat16"], four.precision["bfloat16"]
    assert not alone.fits
    assert part.fits
    assert part.weights_bytes == pytest.approx(alone.weights_bytes / 4, rel=0.01)
    # With more ranks than key-value heads, several hold the same one.
    assert ledger("llama-3.1-70b", tensor_parallel=16).kv_bytes_per_token == 2 * one.kv_bytes_per_token
    # Of 48 blocks in five stages, one has ten: the one with the output matrix or the embedding, or none of them.
    stages = ledger("qwen3-30b-a3b", pipeline_parallel=5)
    assert stages.kv_bytes_per_token == ledger("qwen3-30b-a3b").kv_bytes_per_token
    assert stages.precision["bfloat16"].weights_bytes > ledger("qwen3-30b-a3b").precision["bfloat16"].weights_bytes / 5
    with pytest.raises(LayoutError, match="divided among 3"):
        ledger("llama-3.1-70b", tensor_parallel=3)


def test_windows_reach_less_than_they_keep() -> None:
    plan = ledger("gemma-3-27b", context=32_768)
    per_layer = plan.kv_bytes_per_token // 62
    assert plan.kv_bytes_within_windows == per_layer * (10 * 32_768 + 52 * 1024)
    assert plan.kv_bytes_per_request == 32_768 * plan.kv_bytes_per_token
    short = ledger("gemma-3-27b", context=512)
    assert short.kv_bytes_within_windows == 512 * short.kv_bytes_per_token


def test_quantised_weights() -> None:
    spec = SHAPES["llama-3.1-70b"]
    four = estimate(spec, "bfloat16", "int4")
    assert 39e9 < sum(four.values()) < 41e9  # what such files weigh
    eight = estimate(spec, "bfloat16", "fp8")
    assert 72.5e9 < sum(eight.values()) < 73e9
    oss = estimate(SHAPES["gpt-oss-20b"], "bfloat16", "mxfp4")
    assert sum(oss.values()) == pytest.approx(13.76e9, rel=0.01)  # the published files
    with pytest.raises(ValueError, match="none of int4"):
        estimate(spec, "bfloat16", "int3")
    plan = ledger("llama-3.1-70b", "int4")
    assert plan.precision["auto"].fits
    assert not plan.precision["bfloat16"].fits  # decoded, they are what they were before
    assert plan.precision["bfloat16"].weights_bytes > 2 * spec.num_parameters
    # Groups of 32 with a scale and a minimum: a quarter more than the codes alone.
    packed, others = product_parameters(spec) * 5 // 8, 2 * 2 * spec.vocab_size * spec.hidden_size
    assert plan.precision["auto"].weights_bytes == pytest.approx(packed + others, rel=1e-3)
    experts = ledger("gpt-oss-20b", "mxfp4")
    assert experts.precision["auto"].weights_bytes < experts.precision["bfloat16"].weights_bytes * 0.62


def test_a_plan_is_what_the_engine_would_do(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_model(path, encoding=GGMLQuantizationType.Q8_0, tied=False)
    source = find_source(str(path))
    assert set(source.stored_bytes) == {"Q8_0", "F32"}
    plan = make_ledger(source, Workload(1 << 30, 256, 4))
    runner = load_runner(path, device="cpu", precision="bfloat16", max_model_len=256, kv_cache_bytes=1 << 20)
    room = plan.precision["bfloat16"]
    assert room.weights_bytes == runner.decoder.num_bytes
    auto = plan.precision["auto"]
    packed = runner.decoder.num_bytes - product_parameters(source.spec) * 2 + product_parameters(source.spec) * 36 // 32
    output = source.spec.vocab_size * source.spec.hidden_size
    assert auto.weights_bytes == packed - output * 2 + output * 36 // 32
    assert plan.parameters == runner.spec.num_parameters
    assert plan.kv_bytes_per_token == runner.ledger().kv_bytes_per_token
    free = (1 << 30) - room.weights_bytes - room.activation_bytes
    blocks = choose_num_blocks(
        bytes_per_token=plan.kv_bytes_per_token,
        block_size=16,
        max_model_len=256,
        max_num_seqs=1 << 20,
        budget_bytes=None,
        free_bytes=free,
        on_gpu=True,
    )
    assert room.kv_capacity_tokens == (blocks - 1) * 16


def test_what_cannot_be_planned() -> None:
    with pytest.raises(ValueError, match="outside 1 to 4096"):
        ledger("llama-2-7b", context=4097)
    with pytest.raises(ValueError, match="at least 1"):
        ledger("llama-2-7b", parallel=0)
    with pytest.raises(ValueError, match="neither a file nor"):
        find_source("no-such-model")


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("24 GiB", 24 << 30), ("512MB", 512 * 10**6), ("1000", 1000), ("1.5TB", 15 * 10**11)],
)
def test_sizes_of_memory(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(("text", "count"), [("32k", 32_768), ("4096", 4096), ("1M", 1 << 20)])
def test_lengths_of_contexts(text: str, count: int) -> None:
    assert parse_tokens(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "80XB", "nanGB", "1e400"])
def test_refused_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="80GB"):
        parse_bytes(text)
    with pytest.raises(ValueError, match="32k"):
        parse_tokens(text)


def test_the_command_prints_json_and_loads_no_torch() -> None:
    code = (
        "import sys; from engine.planning.__main__ import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    arguments = ["llama-3.1-8b", "--gpu-memory", "80GB", "--context", "8k", "--parallel", "64"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    planned = ledger("llama-3.1-8b", context=8192, parallel=64)
    assert plan["precision"]["auto"]["requests"] == planned.precision["auto"].requests
    refused = subprocess.run(
        [sys.executable, "-m", "engine.planning", "nothing", "--gpu-memory", "80GB"], capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "neither a file nor" in refused.stderr


def test_a_config_alone_and_with_its_weights(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny.gguf", tied=False)
    folder = tmp_path / "tiny"
    model.save_pretrained(folder)
    whole = find_source(str(folder))
    assert whole.spec.num_parameters == model.num_parameters()
    assert whole.stored_bytes == {"F32": 4 * model.num_parameters()}
    (folder / "model.safetensors").unlink()
    for path in (folder, folder / "config.json"):
        alone = find_source(str(path))
        assert (alone.name, alone.spec, alone.stored_bytes) == ("tiny", whole.spec, whole.stored_bytes)
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    assert find_source(str(folder)).stored_bytes == estimate(whole.spec, "bfloat16", "int4")
    assert find_source(str(folder), "fp8").stored_bytes == estimate(whole.spec, "bfloat16", "fp8")
    for content, problem in (
        ("[]", "no JSON object"),
        ("{", "cannot be read"),
        ('{"architectures": ["Other"]}', "'Other' is not supported"),
    ):
        (folder / "config.json").write_text(content)
        with pytest.raises(ModelFileError, match=problem):
            find_source(str(folder))
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float8"}))
    with pytest.raises(ModelFileError, match="'float8' are not supported"):
        find_source(str(folder))
