"""No answer crosses from one tenant to another: by what a key is made of, and by where a store looks.

Tenants are told apart by scope (key, team or organisation), salt, model and epoch. Whatever a field is called
and wherever it stands, it keeps requests apart, and an answer's later questions are those of its own tenant.
"""

from __future__ import annotations

import asyncio
import copy
import time
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.entry import Entry
from cache.key import CacheKey, build_key
from cache.store.answers import Store
from cache.store.changes import Purge

# Few of each, so that tenants often have all but one thing in common; some run together alike.
SCOPES = ("key:a", "team:a", "organisation:a", "team:ab", "team:", "team:a\x00")
SALTS = (None, "", "a", "b", "ab", 1)
MODELS = ("small", "large", "smalll")
SYSTEMS = ("", "Be brief.", "Be long.")
QUESTIONS = ("What is a river?", "what is a river", "What is the mouth of a river?", "Is a river long?")
VECTORS = dict(zip(QUESTIONS, np.eye(4, 8, dtype=np.float32), strict=True))

Tenant = tuple[str, Any, str, int]
tenants = st.tuples(*map(st.sampled_from, (SCOPES, SALTS, MODELS)), st.integers(0, 1))
asked = st.tuples(tenants, st.sampled_from(QUESTIONS), st.sampled_from(SYSTEMS))


def key_of(tenant: Tenant, text: str, system: str = "") -> CacheKey:
    scope, salt, model, epoch = tenant
    messages = [{"role": "system", "content": system}] if system else []
    payload: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": text}]}
    if salt is not None:
        payload["cache_salt"] = salt
    return build_key(payload, scope=scope, model_group=model, epoch=epoch)


def entry(id: str, question: str) -> Entry:
    now = time.time()
    return Entry(id, b"{}", "m", "small", 1, 1, 1, now, now + 1000, question)


@given(first=tenants, second=tenants, text=st.sampled_from(QUESTIONS))
def test_a_partition_is_one_tenants(first: Tenant, second: Tenant, text: str) -> None:
    assert (key_of(first, text).partition == key_of(second, text).partition) == (first == second)
    assert (key_of(first, text).exact == key_of(second, text).exact) == (first == second)
    assert key_of(first, text).context == key_of(second, text).context


@settings(max_examples=80, deadline=None)
@given(
    kept=st.lists(asked, max_size=10),
    aliases=st.lists(st.tuples(st.integers(0, 9), asked), max_size=6),
    purged=st.sampled_from([None, *SCOPES]),
    looked=st.lists(asked, max_size=6),
)
def test_no_look_up_finds_an_answer_of_another(
    kept: list[Any], aliases: list[tuple[int, Any]], purged: str | None, looked: list[Any]
) -> None:
    """In the same words, in the words written otherwise, and by vector; after later questions were added to answers of
    any tenant, or tried to be; and a purge of one tenant takes nobody else's."""
    asyncio.run(_no_look_up_finds_an_answer_of_another(kept, aliases, purged, looked))


async def _no_look_up_finds_an_answer_of_another(
    kept: list[Any], aliases: list[tuple[int, Any]], purged: str | None, looked: list[Any]
) -> None:
    store = Store(None, "e", max_entries=1000, max_bytes=1 << 24)
    owner: dict[str, tuple[Tenant, str]] = {}
    for number, (tenant, text, system) in enumerate(kept):
        owner[str(number)] = (tenant, system)
        assert store.put(key_of(tenant, text, system), entry(str(number), text), VECTORS[text]).answer_id is not None
    for number, (tenant, text, system) in aliases:
        answer_id = store.answer_of(str(number))
        if answer_id is not None:
            refusal = store.add_alias(key_of(tenant, text, system), answer_id, VECTORS[text], "somebody")
            assert refusal is None or (tenant, system) != owner[str(number)]
            assert refusal is not None or (tenant, system) == owner[str(number)]
    before = {id for id in owner if store.answer_of(id) is not None}
    if purged is not None:
        await store.purge(Purge(scope=purged))
        after = {id for id in before if store.answer_of(id) is not None}
        assert before - after == {id for id in before if owner[id][0][0] == purged}
    for tenant, text, system in [*looked, *kept]:
        key = key_of(tenant, text, system)
        near = [store.answer(one, key) for one in await store.nearest(key, VECTORS[text], 100)]
        found = [store.get_exact(key), store.get_folded(key), *near]
        assert {owner[one.entry.id] for one in found if one is not None} <= {(tenant, system)}
        own = {id for id in owner if store.answer_of(id) is not None and owner[id] == (tenant, system)}
        assert {one.entry.id for one in found if one is not None} == own, "and every one of its own"


# -- fields that nobody has heard of -----------------------------------------------------------------------------------

REQUEST: dict[str, Any] = {
    "model": "auto",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": [{"type": "text", "text": "What is a river?"}]},
    ],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "response_format": {"type": "json_object"},
}
PLACES: tuple[tuple[Any, ...], ...] = (
    (), ("messages", 0), ("messages", 1), ("messages", 1, "content", 0), ("messages", 2), ("messages", 3),
    ("messages", 3, "content", 0), ("tools", 0), ("tools", 0, "function"), ("response_format",),
)  # fmt: skip
KNOWN = {
    "model", "messages", "tools", "response_format", "role", "content", "type", "text", "name", "function",
    "cache_salt", "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
    "store", "stream", "stream_options", "user", "frequency_penalty", "presence_penalty", "n", "logprobs",
    "logit_bias", "stop", "functions", "modalities", "max_tokens", "max_completion_tokens", "top_k", "temperature",
}  # fmt: skip
values = st.recursive(
    st.booleans() | st.integers(-3, 3) | st.text(max_size=3) | st.floats(-2, 2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@given(
    name=st.text(min_size=1, max_size=12).filter(lambda name: name not in KNOWN),
    value=values,
    place=st.sampled_from(PLACES),
)
def test_a_field_that_nobody_has_heard_of_keeps_requests_apart(name: str, value: Any, place: tuple[Any, ...]) -> None:
    with_field = copy.deepcopy(REQUEST)
    target: Any = with_field
    for step in place:
        target = target[step]
    target[name] = value
    plain, other = key(REQUEST), key(with_field)
    assert other.context != plain.context
    assert other.exact != plain.exact
    assert key(copy.deepcopy(with_field)) == other
    target[name] = [value]
    assert key(with_field).context != other.context, "and so does what it says"


def key(payload: dict[str, Any]) -> CacheKey:
    return build_key(payload, scope="team:1", model_group="m")
