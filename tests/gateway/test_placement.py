"""Several replicas behind a real gateway: what a request's choice is made by, and what is on record of it."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
import pytest_asyncio
import yaml

from bench.mock_upstream import MockUpstream
from gateway import settings
from policies.yamlfile import InvalidFile
from tests.gateway.front_door import PRICE, configuration, eventually, front_door

LONG = "Here are the terms of the contract, which everybody has to read before anything else happens. " * 30


@pytest_asyncio.fixture
async def upstreams():
    servers = [MockUpstream() for _ in range(2)]
    for server in servers:
        await server.start()
    yield servers
    for server in servers:
        await server.stop()


def document(servers, replicas=None, **backend):
    models = {
        name: {"tier": "small", "backend": "one", "upstream_model": upstream, "price": PRICE}
        for name, upstream in {"mock": "mock", "late": "mock,first_ms=300", "slow": "mock,interval_ms=30"}.items()
    }
    given = configuration({"one": servers[0]}, models)
    described = given["backends"]["one"]
    if replicas is None:
        described["base_urls"] = [server.base_url for server in servers]
    else:
        del described["base_urls"]
        described["replicas"] = [
            {"url": server.base_url, **special} for server, special in zip(servers, replicas, strict=True)
        ]
    described |= backend
    return given


def asked(text, **body):
    return {"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": text}], **body}


async def test_a_conversation_stays_where_its_beginning_is(tmp_path, upstreams):
    async with front_door(tmp_path, document(upstreams)) as door:
        for number in range(6):
            answer = await door.chat(**asked(f"Question {number}"), stream=number % 2 == 0)
            assert answer.status_code == 200
        rows = await door.rows()
        assert len({row["replica"] for row in rows}) == 1
        assert rows[0]["placed"].startswith("work 0/")
        assert all(row["placed"].startswith("prefix ") for row in rows[1:])
        pool = door.services.pools["one"]
        assert [replica.work for replica in pool.replicas] == [0, 0]
        page = (await door.client.get("/metrics")).text
        assert 'tierline_placement_total{backend="one",reason="prefix"} 5.0' in page
        command = ["-m", "gateway.cli", "explain", rows[-1]["request_id"], "--config", str(tmp_path / "tierline.yaml")]
        shown = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
        text, _ = await shown.communicate()
        assert f"placed     {rows[-1]['placed']}" in text.decode()


async def test_marks_that_move_with_every_turn_change_no_beginning(tmp_path, upstreams):
    async with front_door(tmp_path, document(upstreams)) as door:
        for marked in (False, True, False):
            part = {"type": "text", "text": LONG} | ({"cache_control": {"type": "ephemeral"}} if marked else {})
            answer = await door.chat(messages=[{"role": "user", "content": [part]}])
            assert answer.status_code == 200
        assert [row["placed"].split()[0] for row in await door.rows()] == ["work", "prefix", "prefix"]


async def test_short_prompts_and_other_beginnings_are_spread(tmp_path, upstreams):
    async with front_door(tmp_path, document(upstreams)) as door:
        for number in range(20):
            await door.chat()
            await door.chat(messages=[{"role": "user", "content": f"{number} " + LONG}])
        rows = await door.rows()
        assert len({row["replica"] for row in rows if row["placed"].startswith("work")}) == 2


async def test_a_favourite_that_has_too_much_to_do_is_left_alone(tmp_path, upstreams):
    async with front_door(tmp_path, document(upstreams)) as door:
        await door.chat(**asked("first"))
        await asyncio.gather(*(door.chat("late", **asked(f"{number}"), stream=True) for number in range(24)))
        rows = await door.rows()
        assert {row["placed"].split()[0] for row in rows} >= {"prefix", "busy"}
        assert len({row["replica"] for row in rows}) == 2


async def test_without_prefixes_and_with_one_replica_nothing_is_looked_at(tmp_path, upstreams):
    async with front_door(tmp_path, document(upstreams[:1])) as door:
        await door.chat(**asked("first"))
        [row] = await door.rows()
        assert row["placed"] == ""
        assert door.services.pools["one"].placer is None
    (tmp_path / "off").mkdir()
    async with front_door(tmp_path / "off", document(upstreams, placement={"prefix": "off"})) as door:
        for _ in range(20):
            await door.chat(**asked("again"))
        rows = await door.rows()
        assert len({row["replica"] for row in rows}) == 2
        assert all(row["placed"].startswith("work 0/") for row in rows)


async def test_long_and_patient_requests_have_their_own_replicas(tmp_path, upstreams):
    replicas = [{"group": "short", "max_prompt_tokens": 2000}, {"group": "long"}]
    one = document(upstreams, replicas, placement={"long_from_tokens": 500})
    async with front_door(tmp_path, one) as door:
        await door.chat()
        await door.chat(**asked("long"))
        rows = await door.rows()
        assert [row["replica"] for row in rows] == [server.base_url for server in upstreams]
    (tmp_path / "pools").mkdir()
    two = document(upstreams, [{}, {"pool": "spot"}])
    async with front_door(tmp_path / "pools", two) as door:
        await door.chat()
        await door.chat(service_tier="flex")
        rows = await door.rows()
        assert [row["replica"] for row in rows] == [server.base_url for server in upstreams]


async def test_a_backend_outside_its_hours_says_when_it_is_back(tmp_path, upstreams, monkeypatch):
    monkeypatch.setattr("backends.placement.hours.Hours.open", lambda self: False)
    monkeypatch.setattr("backends.placement.hours.Hours.opens_in_s", lambda self: 3600.0)
    hours = [{"hours": "09-18"}, {"hours": "Mon-Fri 09-18"}]
    async with front_door(tmp_path, document(upstreams, hours)) as door:
        answer = await door.chat()
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "3600"
        assert not await door.rows()
        shown = json.dumps([state.state for state in door.services.pools["one"].snapshot()])
        assert shown == '["closed", "closed"]'


async def test_an_answer_that_is_under_way_goes_on_when_its_replica_closes(tmp_path, upstreams, monkeypatch):
    closed = False
    monkeypatch.setattr("backends.placement.hours.Hours.open", lambda self: not closed)
    async with front_door(tmp_path, document(upstreams, [{"hours": "09-18"}, {"pool": "overflow"}])) as door:
        slow = asyncio.create_task(door.chat("slow", stream=True))
        pool = door.services.pools["one"]
        await eventually(lambda: pool.replicas[0].outstanding == 1)
        closed = True
        await door.chat()
        assert "[DONE]" in (await slow).text
        rows = await door.rows()
        assert [row["outcome"] for row in rows] == ["success", "success"]
        assert [row["replica"] for row in rows] == [server.base_url for server in upstreams]


BASE = """\
backends:
  b:
    replicas:
      - {url: "http://a/v1"}
      - {url: "http://b/v1"}
models: {m: {tier: small, backend: b}}
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ('{url: "http://a/v1"}', '{url: "http://a/v1", hours: 9-5pm}', 4, "hours are spans such as"),
        ('{url: "http://a/v1"}', '{url: "http://a/v1", hours: 09-09}', 4, "a whole day is 00-24"),
        ('{url: "http://a/v1"}', '{url: "http://a/v1", hours: "Mo 09-10"}', 4, "hours are spans such as"),
        ('{url: "http://a/v1"}', '{url: "http://a/v1", hours: "Mon-Foo 9-10"}', 4, "has the day 'Foo'"),
        ('{url: "http://a/v1"}', '{url: "http://a/v1", hours: 09-25}', 4, "a time that no day has"),
        ('{url: "http://a/v1"}', '{url: "http://a/v1", engine: e}', 4, "either a 'url' or an 'engine'"),
        ('{url: "http://a/v1"}', "{engine: e}", 4, "engine 'e' of backend 'b' is not in 'engines'"),
        ('{url: "http://a/v1"}', '{url: "http://a/v1", group: short}', 2, "say from when on a prompt is long"),
        ('{url: "http://a/v1"}', '{url: "http://a/v1", group: shrt}', 4, "'short' or 'long'"),
        ('{url: "http://a/v1"}', '{url: "http://a/v1", weigth: 2}', 4, "weigth"),
        ('{url: "http://a/v1"}', '{url: "http://a/v1", weight: 0}', 4, "greater than 0"),
        ('{url: "http://a/v1"}', '{url: "http://a/v1", region: eu}', 2, "placement.regions, which says what is near"),
        ('"http://a/v1"', '"http://b/v1/"', 2, "an address twice"),
        ("models:", "    placement: {time_zone: Berlin}\nmodels:", 6, "there is no time zone 'Berlin'"),
        ("models:", "    placement: {regions: [eu]}\nmodels:", 2, "no replica is in eu"),
        ("models:", "    placement: {long_from_tokens: 9}\nmodels:", 2, "has no effect"),
        ("models:", "    placement: {prefix: engine}\nmodels:", 6, "'sent', 'events' or 'off'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_line(tmp_path, old, new, line, said):
    path = tmp_path / "tierline.yaml"
    path.write_text(BASE.replace(old, new, 1))
    with pytest.raises(InvalidFile) as refused:
        settings.load(path)
    [problem] = refused.value.problems
    assert said in problem.message
    assert problem.line == line


def test_replicas_may_be_bundled_engines(tmp_path):
    path = tmp_path / "tierline.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "engines": {"a": {"model": "m", "port": 8101}, "b": {"model": "m", "port": 8102}},
                "backends": {"local": {"replicas": [{"engine": "a"}, {"engine": "b", "weight": 2}]}},
                "models": {"tiny": {"tier": "small", "backend": "local"}},
            }
        )
    )
    from gateway.processes import process_specs

    loaded = settings.load(path)
    assert loaded.base_urls("local") == ("http://127.0.0.1:8101/v1", "http://127.0.0.1:8102/v1")
    assert "prefill" in loaded.abilities("tiny")
    specs = {spec.name: spec for spec in process_specs(loaded, path, {"a": path, "b": path})}
    seeds = {specs[name].env["TIERLINE_PAGE_SEED"] for name in ("engine-a", "engine-b")}
    assert len(seeds) == 1
    assert "tiny" in specs["engine-b"].argv
