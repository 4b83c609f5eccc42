"""Pages of the real KV cache as bytes: both ways to copy them, and an engine that goes on with another's."""

import pytest
import torch

from engine.assembly import build_scheduler, build_tiers
from engine.config import EngineConfig
from engine.load_runner import load_runner
from engine.messages import NewRequest
from engine.transfer.page_memory import TensorPages
from engine.types import SamplingParams
from tests.engine.models import write_model
from tests.engine.page_stores import wait_saved

PROMPT = [5 + i % 300 for i in range(70)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_device", [True, False])
def test_a_page_comes_back_bit_by_bit(dtype, by_device):
    cache = torch.randn(3, 2, 9, 4, 2, 8).to(dtype)
    cache[0, 0, 2, 0, 0, 0] = float("nan")
    pages = TensorPages(cache)
    if by_device:
        pages._host = None  # the way that a GPU goes
    assert pages.page_bytes == 3 * 2 * 4 * 2 * 8 * dtype.itemsize
    before = cache.clone()
    contents = pages.read([2, 5])
    pages.write([7, 2], [memoryview(content) for content in contents])
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    expected = before.clone()
    expected[:, :, 7], expected[:, :, 2] = before[:, :, 2], before[:, :, 5]
    assert torch.equal(cache.view(bits), expected.view(bits))


def test_layouts_differ_where_bytes_mean_something_else():
    shapes = [(3, 2, 9, 4, 2, 8), (3, 2, 9, 8, 2, 4), (2, 2, 9, 4, 2, 12)]
    layouts = {TensorPages(torch.zeros(shape)).layout for shape in shapes}
    layouts.add(TensorPages(torch.zeros(shapes[0], dtype=torch.bfloat16)).layout)
    assert len(layouts) == 4
    assert TensorPages(torch.zeros(3, 2, 5, 4, 2, 8)).layout in layouts, "however many pages there are"


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_model(path)
    return load_runner(path, precision="float32", device="cpu", max_model_len=128, kv_cache_bytes=13 * 16 * 1024)


def generate(scheduler, runner, tiers, number, prompt, max_tokens=8):
    """The tokens, and how many of the prompt's were cached."""
    new = NewRequest(number, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    if not tiers.enter([new], [scheduler.request_of(new)], {}):
        scheduler.add([new])
    while len(tiers):
        for party in tiers.ready():
            scheduler.add(party.requests, party.grammars)
    tokens, cached = [], None
    while scheduler.has_work:
        plan = scheduler.schedule()
        tiers.spill()
        for output in scheduler.update(plan, runner.execute(plan)):
            assert output.error is None
            tokens += output.token_ids
            cached = output.cached_tokens if output.cached_tokens is not None else cached
        tiers.share()
    for tier in tiers.tiers:
        wait_saved(tier)
    return tokens, cached


def test_pages_that_were_evicted_to_a_file_come_back_and_give_the_same_tokens(runner, tmp_path):
    config = EngineConfig(
        model_path="", served_name="", precision="float32", kv_host_bytes=1 << 20, kv_host_dir=str(tmp_path)
    )
    scheduler = build_scheduler(config, runner, b"digest", frozenset())
    tiers = build_tiers(config, scheduler.cache, TensorPages(runner.attention.kv_cache), b"digest", on_gpu=False)
    alone, cached = generate(scheduler, runner, tiers, 1, PROMPT)
    assert cached == 0
    for number in range(2, 4):
        assert generate(scheduler, runner, tiers, number, PROMPT) == (alone, 64)
    for number in range(10, 22):  # twice each, so that even protected pages go
        for turn in range(2):
            generate(scheduler, runner, tiers, number * 10 + turn, [number, *PROMPT[:66]], max_tokens=1)
    assert scheduler.cache.find(scheduler.request_of(NewRequest(0, PROMPT, SamplingParams())), 4) == []
    runner.attention.kv_cache[:] = float("nan")  # what is not loaded or computed must not be read
    scheduler.cache.pool.check([])
    assert generate(scheduler, runner, tiers, 900, PROMPT) == (alone, 64)
    assert tiers.counts()["host"]["loaded"] == 4
    tiers.close()


def test_settings_that_make_no_sense_are_refused(runner, tmp_path, monkeypatch):
    scheduler = build_scheduler(EngineConfig(model_path="", served_name=""), runner, b"", frozenset())
    pages = TensorPages(runner.attention.kv_cache)

    def build(**settings):
        config = EngineConfig(model_path="", served_name="", **settings)
        return build_tiers(config, scheduler.cache, pages, b"", on_gpu=False)

    assert build() is None
    with pytest.raises(ValueError, match=r"on a CPU they are in main memory already\. Give kv_host_dir"):
        build(kv_host_bytes=1 << 20)
    with pytest.raises(ValueError, match="100 bytes hold no page"):
        build(kv_host_bytes=100, kv_host_dir=str(tmp_path))
    monkeypatch.setenv("TIERLINE_KV_REDIS_URL", "http://redis")
    with pytest.raises(ValueError, match="must begin with redis://, rediss:// or unix://"):
        build()
    monkeypatch.setenv("TIERLINE_KV_REDIS_URL", "redis://:secret@localhost:1")
    monkeypatch.delenv("TIERLINE_PAGE_SEED", raising=False)
    with pytest.raises(ValueError, match="set it to the same 64 hexadecimal digits") as refused:
        build()
    assert "secret" not in str(refused.value)
    monkeypatch.setenv("TIERLINE_PAGE_SEED", "ab" * 32)
    with pytest.raises(ValueError, match="10 bytes hold no page"):
        build(kv_redis_bytes=10)
