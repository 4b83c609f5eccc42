"""Which of several replicas is chosen, and by what: the arithmetic, without a network and with a clock of its own."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.endpoint import Endpoint
from backends.placement.asked import Placement
from backends.placement.chain import STEP_BYTES, chained
from backends.placement.hours import Hours
from backends.placement.index import MOMENT_S, PrefixIndex
from backends.placement.place import Place, Preferences
from backends.placement.placer import FLOOR_TOKENS, Placer
from backends.pool import Pool
from backends.replica import Replica

KEY = bytes(range(32))


def chain(text: str, salt: str = "", tokens: int = 1000):
    return chained([text.encode()], salt.encode(), KEY, tokens)


def replicas(number: int = 2, *places: Place) -> list[Replica]:
    given = list(places) + [Place()] * (number - len(places))
    return [Replica(Endpoint(f"http://r{i}/v1"), given[i]) for i in range(number)]


def placer(of: list[Replica], most: int = 10, index: PrefixIndex | None = None, **preferences) -> Placer:
    return Placer(of, most, Preferences(**preferences), index or PrefixIndex(600.0, 1_000_000))


def send(chosen_by: Placer, placement: Placement, of: list[Replica], now: float = 0.0) -> Replica:
    replica = chosen_by.choose(of, placement, now)
    assert replica is not None
    chosen_by.begin(replica, placement, now)
    replica.outstanding += 1
    return replica


def over(replica: Replica, placement: Placement) -> None:
    replica.outstanding -= 1
    placement.end(replica)


# The beginnings of prompts.


def test_prompts_share_their_digests_up_to_where_they_differ():
    common = "a" * 5000
    one, other = chain(common + "b" * 5000), chain(common + "c" * 9000)
    shared = [a for a, b in zip(one, other, strict=False) if a[0] == b[0]]
    assert 430 <= shared[-1][1] <= 500, "half of the tokens, to within an eighth"
    assert len(one) > len(shared)
    assert [digest for digest, _ in one] != [digest for digest, _ in chain(common + "b" * 5000, salt="team")]
    assert chain("a" * (STEP_BYTES - 1)) == ()
    assert len(chain("a" * 1_000_000)) < 100


@given(st.lists(st.binary(max_size=700), max_size=8), st.integers(0, 8))
def test_a_chain_does_not_depend_on_how_a_prompt_is_cut(parts, cut):
    whole = b"".join(parts)
    assert chained(parts, b"", KEY, 500) == chained([whole[:cut], whole[cut:]], b"", KEY, 500)
    longer = chained([whole, b"x" * 3000], b"", KEY, 500)
    assert [digest for digest, _ in longer][: len(chained([whole], b"", KEY, 500))] == [
        digest for digest, _ in chained([whole], b"", KEY, 500)
    ]


# The choice.


def test_a_prompt_goes_where_its_beginning_went():
    of = replicas(4)
    chooser = placer(of)
    text = "The terms of the contract. " * 200
    first = Placement(1000, 100, chain=chain(text))
    home = send(chooser, first, of)
    assert (first.why, first.expected_hit) == ("work", 0)
    over(home, first)
    for question in ("When does it end?", "Who signed it?"):
        again = Placement(1000, 100, chain=chain(text + question))
        assert send(chooser, again, of) is home
        assert again.why == "prefix"
        assert again.expected_hit > 800
        over(home, again)
    assert chooser.choose(of, Placement(1000, 100, chain=chain(text, salt="another team")), 0.0)
    assert home.work == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4000), st.booleans()), max_size=80), st.integers(2, 5))
def test_no_favourite_is_ahead_by_more_than_it_saves_twice(requests, number):
    of = replicas(number)
    chooser = placer(of, most=1000)
    running: list[tuple[Replica, Placement]] = []
    for group, tokens, ends in requests:
        text = f"{group}" * 8000
        placement = Placement(tokens, 100, chain=chained([text.encode()], b"", KEY, tokens))
        least = min(replica.work for replica in of)
        before = {replica: replica.work for replica in of}
        chosen = send(chooser, placement, of)
        running.append((chosen, placement))
        assert before[chosen] - least <= 2 * placement.expected_hit + 0.05 * (least + 2 * tokens + FLOOR_TOKENS) + 1
        if ends:
            over(*running.pop(0))
    for replica, placement in running:
        over(replica, placement)
    assert [replica.work for replica in of] == [0] * number
    assert all(not placement.loads for _, placement in running)


def test_a_busy_favourite_is_passed_over_and_said_so():
    of = replicas()
    chooser = placer(of)
    text = "x" * 4000
    home = send(chooser, Placement(1000, 0, chain=chain(text)), of)
    home.work = 10_000
    away = Placement(1000, 0, chain=chain(text))
    assert send(chooser, away, of) is not home
    assert away.why == "busy"
    assert chooser.chosen == Counter(work=1, busy=1)


def test_work_falls_when_an_answer_begins_and_the_pace_is_learnt():
    of = replicas()
    chooser = placer(of)
    placement = Placement(872, 100)
    replica = send(chooser, placement, of)
    assert replica.work == 922
    chooser.began(replica, placement, 2.0, 1.0)
    assert replica.work == pytest.approx(50)
    assert replica.pace.value(1.0) == pytest.approx(2.0 / 1000)
    chooser.began(replica, placement, 9.0, 2.0)
    assert replica.work == pytest.approx(50), "an answer begins once"
    over(replica, placement)
    assert replica.work == 0


def test_a_replica_that_is_far_slower_gets_less():
    of = replicas()
    chooser = placer(of, most=1000)
    of[0].pace.observe(0.001, 0.0)
    of[1].pace.observe(0.001, 0.0)
    random.seed(3)
    even = Counter(chooser.choose(of, Placement(100, 0), 0.0) for _ in range(100))
    assert min(even.values()) > 25
    of[1].pace.observe(0.010, 0.0)
    assert {chooser.choose(of, Placement(100, 0), 0.0) for _ in range(50)} == {of[0]}


def test_weights_are_shares():
    of = replicas(2, Place(weight=3.0))
    chooser = placer(of, most=1000)
    random.seed(3)
    idle = Counter(chooser.choose(of, Placement(100, 0), 0.0) for _ in range(1000))
    assert idle[of[0]] / 1000 == pytest.approx(0.75, abs=0.05)
    for _ in range(400):
        send(chooser, Placement(1000, 0), of)
    assert of[0].work / of[1].work == pytest.approx(3, rel=0.1)


# What operators prefer.


def group(name, most=None):
    return Place(group=name, max_prompt_tokens=most)


def test_short_and_long_prompts_go_to_their_groups_and_spill_one_way_only():
    of = replicas(3, group("short"), group("long"), Place())
    chooser = placer(of, most=10, long_from=500)
    assert send(chooser, Placement(100, 0), of) is of[0]
    assert send(chooser, Placement(900, 0), of) is of[1]
    of[0].outstanding = of[1].outstanding = 8
    spilled = Placement(100, 0)
    assert send(chooser, spilled, of) is of[2]
    assert spilled.why == "overflow"
    of[2].outstanding = 8
    assert chooser.choose(of, Placement(100, 0), 0.0) is of[0], "all have as much as they should: the best of them"
    of[0].outstanding = 0
    assert chooser.choose(of, Placement(900, 0), 0.0) is of[1], "a long prompt does not go among the short ones"
    last = Placement(900, 0)
    assert chooser.choose(of[:1], last, 0.0) is of[0], "but rather there than nowhere"
    assert last.why == "last"


def test_a_prompt_that_is_too_long_for_a_replica_waits_for_another():
    of = replicas(3, group(None, 1000), group(None, 4000), group(None, 2000))
    chooser = placer(of)
    assert chooser.choose(of[:1], Placement(1500, 0), 0.0) is None
    assert chooser.choose(of, Placement(3000, 0), 0.0) is of[1]
    assert chooser.choose(of, Placement(9000, 0), 0.0) is of[1], "too long for all: the estimate may be wrong"


def test_who_waits_and_who_does_not_have_their_own_pools():
    of = replicas(4, Place(pool="spot"), Place(pool="overflow"), Place(), Place(price_factor=0.5))
    chooser = placer(of, most=10)
    assert send(chooser, Placement(1, 0), of) in of[2:]
    assert send(chooser, Placement(1, 0, patient=True), of) is of[0]
    of[2].outstanding = of[3].outstanding = 8
    assert send(chooser, Placement(1, 0), of) is of[1], "a spike"
    assert chooser.choose([of[0]], Placement(1, 0), 0.0) is of[0]
    of[2].outstanding = of[3].outstanding = 0
    assert send(chooser, Placement(1, 0, patient=True), of[1:]) is of[3], "the cheaper one"


def test_the_nearest_region_comes_first():
    of = replicas(3, Place(region="us"), Place(region="eu"), Place())
    chooser = placer(of, most=10, regions=("eu", "us"))
    assert send(chooser, Placement(1, 0), of) is of[1]
    of[1].outstanding = 8
    assert send(chooser, Placement(1, 0), of) is of[0]
    of[0].outstanding = 8
    assert send(chooser, Placement(1, 0), of) is of[2]


async def test_a_long_prompt_that_waits_does_not_hold_up_the_short_ones_of_others(client):
    urls = ["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"]
    places = [group("short", 1000), group("long")]
    pool = Pool("p", urls, client=client, max_outstanding=1, places=places, preferences=Preferences(long_from=500))
    short, long = Placement(10, 0), Placement(5000, 0)
    taken = pool.acquire((), long)
    assert taken is pool.replicas[1]
    waiting = asyncio.create_task(pool.wait("a", 5.0, Placement(6000, 0)))
    await asyncio.sleep(0)
    assert pool.queued == 1
    assert await pool.wait("b", 5.0, short) is pool.replicas[0]
    pool.release(taken, long)
    assert await waiting is pool.replicas[1]
    assert not pool._asked


# Hours.


@pytest.mark.parametrize(
    ("text", "at", "is_open"),
    [
        ("09-18", "2026-11-30T08:00", True),  # 09:00 in Berlin, a Monday
        ("09-18", "2026-11-30T07:59", False),
        ("09-18", "2026-11-30T17:00", False),
        ("Mon-Fri 08:30-18:00", "2026-12-05T12:00", False),  # a Saturday
        ("22-06", "2026-11-30T22:30", True),
        ("22-06", "2026-12-01T05:30", False),
        ("Sun 22-06", "2026-11-30T03:00", True),  # goes on into Monday
        ("Fri-Mon 00-24", "2026-11-30T12:00", True),
        ("Fri-Mon 00-24", "2026-12-01T12:00", False),
        ("09-12, 14-18", "2026-11-30T12:00", False),
        ("02-03", "2026-03-29T01:30", False),  # the hour that summer time skips
    ],
)
def test_hours_are_those_of_the_time_zone(text, at, is_open):
    from datetime import UTC, datetime

    moment = datetime.fromisoformat(at).replace(tzinfo=UTC).timestamp()
    assert Hours(text, ZoneInfo("Europe/Berlin")).open_at(moment) is is_open


def test_the_time_until_hours_begin_is_found(monkeypatch):
    hours = Hours("Mon 09-10", ZoneInfo("UTC"))
    assert 0 <= hours.opens_in_s() <= 7 * 86400
    always = Hours("00-24", ZoneInfo("UTC"))
    assert always.open()
    assert always.opens_in_s() == 0


# Who holds what.


def test_what_was_sent_is_forgotten_in_time_and_beyond_the_tokens_that_fit():
    one, other = replicas()
    index = PrefixIndex(remember_s=100.0, remember_tokens=1500)
    text = "y" * 4000
    index.sent(chain(text), one, 0.0)
    assert index.hits(chain(text), 99.0)[one] > 900
    assert index.hits(chain(text), 101.0) == {}
    index.sent(chain(text), one, 200.0)
    index.sent(chain("z" * 4000), one, 201.0)
    held = index.hits(chain(text), 202.0)
    assert 0 < held[one] < 700, "the end of the older one had to go, its beginning is there"
    assert other not in held
    index.forget(one)
    assert index.hits(chain("z" * 4000), 202.0) == {}


def pages(*names: str) -> list[tuple[bytes, bytes]]:
    """A chain of pages."""
    return [(name.encode(), names[i - 1].encode() if i else b"") for i, name in enumerate(names)]


def test_what_replicas_tell_counts_more_than_what_was_sent():
    one, other = replicas()
    index = PrefixIndex(600.0, 1_000_000)
    for replica in (one, other):
        index.begin(replica, "space")
    text = "y" * 4000
    index.sent(chain(text), one, 0.0)
    names = [f"p{i}" for i in range(60)]
    index.change(one, [], pages(*names))
    index.answered(chain(text), one, b"p59")
    index.change(other, [], pages(*names[:30]))  # somebody else sent it there
    late = 2 * MOMENT_S
    held = index.hits(chain(text), late)
    assert held[one] > 900
    assert 450 < held[other] < 530, "about half of it"
    index.change(one, [name.encode() for name in names[10:]], [])
    held = index.hits(chain(text), late)
    assert held[one] < 200
    list(index.end(one))
    assert one in index.hits(chain(text), late), "one that tells nothing any more is guessed of again"
    list(index.end(other))
    assert (index.pages, index.spaces) == (0, 0)


def test_beginnings_that_others_share_are_found_where_only_those_are_held():
    one, other, third = replicas(3)
    index = PrefixIndex(600.0, 1_000_000)
    for replica in (one, other, third):
        index.begin(replica, "space")
    system = "s" * 4000
    common = [f"c{i}" for i in range(30)]
    index.change(one, [], pages(*common, *(f"a{i}" for i in range(30))))
    index.answered(chain(system + "a" * 4000, tokens=960), one, b"a29")
    index.change(other, [], pages(*common, *(f"b{i}" for i in range(30))))
    index.answered(chain(system + "b" * 4000, tokens=960), other, b"b29")
    index.change(third, [], pages(*common))
    held = index.hits(chain(system + "c" * 4000, tokens=960), 100.0)
    assert set(held) == {one, other, third}
    assert all(400 <= tokens <= 480 for tokens in held.values())
    whole = index.hits(chain(system + "a" * 4000, tokens=960), 100.0)
    assert whole[one] > 850
    assert whole[other] < 500


def test_a_page_taken_too_far_is_mended_by_the_next_prompt():
    """The first half of a text has few tokens, the second many: its share of bytes lies beyond it in pages."""
    one, other = replicas()
    index = PrefixIndex(600.0, 1_000_000)
    for replica in (one, other):
        index.begin(replica, "space")
    system = "s" * 4000
    common = [f"c{i}" for i in range(10)]
    index.change(one, [], pages(*common, *(f"a{i}" for i in range(50))))
    index.answered(chain(system + "a" * 4000), one, b"a49")
    index.change(other, [], pages(*common))
    assert index.hits(chain(system + "x" * 4000), 100.0)[other] < 200, "not known yet"
    index.change(one, [], pages(*common, *(f"b{i}" for i in range(50))))
    index.answered(chain(system + "b" * 4000), one, b"b49")
    assert index.hits(chain(system + "x" * 4000), 100.0)[other] > 400


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 30), st.booleans()), max_size=60))
def test_nothing_of_pages_is_left_when_all_are_gone(changes):
    of = replicas(3)
    index = PrefixIndex(600.0, 1_000_000)
    for replica in of:
        index.begin(replica, "space")
    for number, tree, length, gone in changes:
        names = [f"{tree}-{i}" for i in range(length)]
        if gone:
            index.change(of[number], [name.encode() for name in names], [])
        else:
            index.change(of[number], [], pages(*names))
            index.answered(chain(f"{tree}" * 3000), of[number], names[-1].encode())
        index.hits(chain(f"{tree}" * 3000), 1.0)
    for replica in of:
        list(index.end(replica))
    assert index.pages == 0


def test_who_tells_nothing_any_more_does_not_count_from_then_on():
    one, other = replicas()
    index = PrefixIndex(600.0, 1_000_000)
    for replica in (one, other):
        index.begin(replica, "space")
        index.change(replica, [], pages(*(f"p{i}" for i in range(60))))
    index.answered(chain("y" * 4000), one, b"p59")
    left = index.end(one)
    assert set(index.hits(chain("y" * 4000), 0.0)) == {other}
    index.begin(one, "space")
    assert set(index.hits(chain("y" * 4000), 0.0)) == {other}, "it begins with nothing, while its past is swept"
    assert len(list(left)) == 1
    index.change(one, [], pages(*(f"p{i}" for i in range(60))))
    assert set(index.hits(chain("y" * 4000), 0.0)) == {one, other}
