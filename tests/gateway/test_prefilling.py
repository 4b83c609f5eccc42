"""Replicas that compute prompts for others: what the file may say, what is started, and legs that fail in every way."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import yaml

from gateway.processes import CannotStart, check_plan, process_specs
from gateway.settings import load
from policies.yamlfile import InvalidFile
from tests.gateway.front_door import PRICE, eventually, front_door

LONG = "rivers flow to the sea, and bridges stand where roads have to cross them. " * 40
ANSWER = {
    "id": "a", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 700, "completion_tokens": 1, "total_tokens": 701},
}  # fmt: skip
COMPUTED = {"object": "prefill", "pages_at": "tcp://10.0.0.5:1", "prompt_page": None, "usage": {"prompt_tokens": 700}}


class Replica:
    """Answers and prefills as told, and remembers what it was asked, by path."""

    def __init__(self):
        self.asked = []
        self.told = (200, json.dumps(COMPUTED))
        self.gate = asyncio.Event()
        self.gate.set()
        self.gone = 0
        self.dead = False  # it takes requests for answers and closes the connection

    async def start(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/v1"
        return self

    async def _serve(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split()[1].decode()
                lines = head.decode().split("\r\n")[1:-2]
                headers = dict(line.lower().split(": ", 1) for line in lines)
                body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
                self.asked.append((path, headers, body))
                if self.dead and "prefill" not in path:
                    return
                status, text = self.told if "prefill" in path else (200, json.dumps(ANSWER))
                if "prefill" in path:
                    gate, left = asyncio.create_task(self.gate.wait()), asyncio.create_task(reader.read(1))
                    await asyncio.wait((gate, left), return_when=asyncio.FIRST_COMPLETED)
                    if left.done():
                        self.gone += 1
                        return
                    left.cancel()
                    await asyncio.gather(left, return_exceptions=True)
                head_lines = f"content-type: application/json\r\ncontent-length: {len(text)}"
                writer.write(f"HTTP/1.1 {status} X\r\n{head_lines}\r\n\r\n{text}".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def document(prefill, decode, **placement):
    replicas = [{"url": one.url, "role": "prefill"} for one in prefill]
    replicas += [{"url": one.url, "role": "decode"} for one in decode]
    return {
        "server": {"port": 0, "drain_seconds": 1},
        "models": {"m": {"tier": "small", "backend": "b", "price": PRICE}},
        "backends": {"b": {"replicas": replicas, "placement": {"prefill_from_tokens": 300, **placement}}},
        "cache": {"enabled": False},
    }


@pytest.fixture
async def pair():
    made = [await Replica().start() for _ in range(2)]
    yield made
    for one in made:
        one.server.close()


def chat(text):
    return {"messages": [{"role": "user", "content": text}]}


async def test_a_long_prompt_is_computed_first_and_counts_once(tmp_path, pair):
    prefill, decode = pair
    async with front_door(tmp_path, document([prefill], [decode])) as door:
        prefilling = door.services.pools["b"].prefilling
        assert (await door.chat("m", **chat("short"))).status_code == 200
        assert not prefill.asked
        assert (await door.chat("m", **chat(LONG))).status_code == 200
        (path, headers, body), (_, told, answered) = prefill.asked[0], decode.asked[-1]
        assert path == "/v1/prefill/chat/completions"
        assert body == answered, "the very same request"
        assert headers["x-request-id"] == told["x-request-id"]
        assert told["x-tierline-pages-from"] == "tcp://10.0.0.5:1"
        assert told["x-tierline-prefilled-tokens"] == "700"
        assert (await door.chat("m", **chat(f"{LONG} and then?"))).status_code == 200
        assert prefilling.legs == {"computed": 1}, "the beginning is believed to be where it was answered"
        rows = await door.rows()
        assert [row["input_tokens"] for row in rows] == [700, 700, 700]
        assert {row["replica"] for row in rows} == {decode.url}
        assert [replica.work for replica in (*prefilling.pool.replicas, *door.services.pools["b"].replicas)] == [0, 0]


@pytest.mark.parametrize(
    ("told", "outcome"),
    [
        ((500, "{}"), "failed"),
        ((503, "{}"), "failed"),
        ((429, "{}"), "failed"),
        ((400, '{"error": {"code": "wrong_role"}}'), "refused"),
        ((200, "no json"), "failed"),
        ((200, json.dumps({**COMPUTED, "pages_at": "tcp://h:1\r\nx-evil: 1"})), "failed"),
        ((200, json.dumps({**COMPUTED, "pages_at": "x" * 301})), "failed"),
        ((200, "x" * 100_000), "failed"),
    ],
)
async def test_a_leg_that_goes_wrong_leaves_the_prompt_to_the_one_that_answers(tmp_path, pair, told, outcome):
    prefill, decode = pair
    prefill.told = told
    async with front_door(tmp_path, document([prefill], [decode])) as door:
        assert (await door.chat("m", **chat(LONG))).status_code == 200
        assert door.services.pools["b"].prefilling.legs == {outcome: 1}
        _, headers, _ = decode.asked[-1]
        assert not [name for name in headers if name.startswith("x-tierline-p")]
        assert [row["outcome"] for row in await door.rows()] == ["success"]


async def test_a_leg_that_takes_too_long_is_given_up_and_a_busy_one_not_waited_for(tmp_path, pair):
    prefill, decode = pair
    prefill.gate.clear()
    settings = document([prefill], [decode], prefill_timeout_s=0.3)
    settings["backends"]["b"]["max_outstanding"] = 1
    settings["backends"]["b"]["replicas"].append(
        {"url": decode.url.replace("127.0.0.1", "localhost"), "role": "decode"}
    )
    async with front_door(tmp_path, settings) as door:
        prefilling = door.services.pools["b"].prefilling
        both = [door.chat("m", **chat(f"{number} {LONG}")) for number in range(2)]
        assert [answer.status_code for answer in await asyncio.gather(*both)] == [200, 200]
        assert prefilling.legs == {"busy": 1, "late": 1}
        await eventually(lambda: prefill.gone == 1)
        assert "tierline_prefills_total{" in (await door.client.get("/metrics")).text


async def test_a_client_that_leaves_during_the_first_leg_ends_it_and_has_begun_an_attempt(tmp_path, pair):
    prefill, decode = pair
    prefill.gate.clear()
    async with front_door(tmp_path, document([prefill], [decode])) as door:
        asked = asyncio.create_task(door.chat("m", **chat(LONG)))
        await eventually(lambda: bool(prefill.asked))
        asked.cancel()
        await eventually(lambda: prefill.gone == 1)
        assert not decode.asked

        async def settled():
            rows = await door.rows()
            return [row["outcome"] for row in rows]

        for _ in range(100):
            if await settled():
                break
        assert await settled() == ["cancelled"]
        pools = door.services.pools["b"]
        assert [replica.outstanding for replica in (*pools.replicas, *pools.prefilling.pool.replicas)] == [0, 0]


async def test_the_next_replica_gets_what_was_computed_for_the_first(tmp_path, pair):
    prefill, decode = pair
    other = await Replica().start()
    decode.dead = True
    async with front_door(tmp_path, document([prefill], [decode, other])) as door:
        for number in range(4):  # until the dead one has been tried
            assert (await door.chat("m", **chat(f"{number} {LONG}"))).status_code == 200
        assert len(decode.asked) >= 1
        assert door.services.pools["b"].prefilling.legs == {"computed": 4}
        assert all(headers["x-tierline-pages-from"] == "tcp://10.0.0.5:1" for _, headers, _ in other.asked)
    other.server.close()


async def test_requests_that_use_no_pages_have_no_first_leg(tmp_path, pair):
    prefill, decode = pair
    async with front_door(tmp_path, document([prefill], [decode])) as door:
        assert (await door.chat("m", **chat(LONG), seed=1)).status_code == 200
        assert not prefill.asked
        assert (await door.chat("m", **chat(LONG[1:]), seed=1, temperature=0)).status_code == 200
        assert len(prefill.asked) == 1, "greedy answers are the same with pages"


# --- what the file may say ------------------------------------------------------------------------------------------

ENGINES = """\
version: 1
models: {m: {tier: small, backend: b}}
engines:
  p: {model: w.gguf, port: 9101}
  d: {model: w.gguf, port: 9102, kv_peers: ["tcp://10.0.0.9:1"]}
  e: {model: w.gguf, port: 9103}
backends:
  b:
    replicas:
      - {engine: p, role: prefill}
      - {engine: d, role: decode}
      - {engine: e}
"""


def written(tmp_path: Path, text: str):
    (tmp_path / "policies").mkdir(exist_ok=True)
    path = tmp_path / "tierline.yaml"
    path.write_text(f"{text}storage: {{data_dir: {tmp_path}/data}}\nserver: {{port: 9100}}\n")
    return path, load(path)


def test_engines_beside_each_other_find_their_pages_by_themselves(tmp_path):
    config, settings = written(tmp_path, ENGINES)
    specs = process_specs(settings, config, dict.fromkeys("pde", tmp_path / "w.gguf"))
    lines = {spec.name: " ".join(spec.argv) for spec in specs}
    where = f"shm://{tmp_path}/data/run/p.pages"
    assert f"--role prefill --kv-listen {where} --kv-outbox-bytes {1 << 30}" in lines["engine-p"]
    assert "--role decode" in lines["engine-d"]
    assert f"--kv-peer {where} --kv-peer tcp://10.0.0.9:1" in lines["engine-d"]
    assert "--role both" in lines["engine-e"]
    assert "--kv-" not in lines["engine-e"].replace("--kv-redis", "").replace("--kv-dtype", "")
    seeds = {spec.env["TIERLINE_PAGE_SEED"] for spec in specs if spec.name.startswith("engine-")}
    assert len(seeds) == 1


def test_an_engine_has_one_role(tmp_path):
    text = ENGINES.replace("backend: b}}", "backend: b}, n: {tier: small, backend: c}}")
    _, settings = written(tmp_path, f"{text}  c:\n    replicas:\n      - {{engine: d}}\n")
    with pytest.raises(CannotStart, match=r"'d' has several roles \(both, decode\)"):
        check_plan(settings)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"roles": ("prefill",)}, "need each other"),
        ({"roles": ("decode", "both")}, "need each other"),
        ({"roles": ("both",), "placement": {"prefill_from_tokens": 9}}, "prefill_from_tokens has no effect"),
        ({"placement": {"prefill_timeout_s": 60}}, "must be below timeouts.first_token_s"),
        ({"dialect": "anthropic"}, "only bundled engines have roles"),
        ({"roles": ("prefill", "decode", "judge")}, "both"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, change, why):
    roles = change.pop("roles", ("prefill", "decode"))
    replicas = [{"url": f"http://h{number}/v1", "role": role} for number, role in enumerate(roles)]
    document = {"version": 1, "models": {"m": {"tier": "small", "backend": "b", "max_output_tokens": 9}},
                "backends": {"b": {"replicas": replicas, **change}}}  # fmt: skip
    with pytest.raises(InvalidFile, match=why):
        written(tmp_path, yaml.safe_dump(document))
