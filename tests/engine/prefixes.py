"""A prefix cache without a model: requests that compute their pages at once."""

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import PrefixCache
from engine.scheduling.request import Request
from engine.types import SamplingParams


def make_cache(num_blocks: int = 17, *, model: bytes = b"m", kv_dtype: str = "float32", enabled: bool = True):
    cache = PrefixCache(BlockPool(num_blocks), 4, model_digest=model, kv_dtype=kv_dtype, enabled=enabled)
    cache._seed = b"the same seed, to compare caches"
    return cache


_ids = iter(range(1, 1_000_000))


def make_request(cache: PrefixCache, tokens, salt: str | None = None) -> Request:
    number = next(_ids)
    tokens = list(tokens)
    return Request(number, number, tokens, len(tokens), SamplingParams(), 10_000, cache.root(salt))


def compute(cache: PrefixCache, request: Request) -> None:
    """What the scheduler and a forward pass do for all tokens of a request."""
    cache.adopt(request, cache.match(request), count=True)
    assert cache.extend(request, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    cache.publish(request)


def use(cache: PrefixCache, tokens, salt: str | None = None) -> Request:
    request = make_request(cache, tokens, salt)
    compute(cache, request)
    cache.release(request)
    return request
