"""Keys: every component counts, nothing else does, and the same request has the same key on every machine."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache import key as key_module
from cache.key import CacheKey, build_key

REQUEST: dict[str, Any] = {
    "model": "auto",
    "messages": [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "What is the capital of France?"},
    ],
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 7,
    "stop": ["\n\n"],
    "max_completion_tokens": 100,
    "response_format": {"type": "json_object"},
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"50256": -100},
    "reasoning_effort": "low",
    "top_k": 40,
}


def key(payload: dict[str, Any] = REQUEST, **changes: Any) -> CacheKey:
    given: dict[str, Any] = {"scope": "team:1", "model_group": "auto", "epoch": 0, **changes}
    return build_key(payload, **given)


def changed(*path: Any, to: Any) -> dict[str, Any]:
    """The request with one value replaced, or removed when `to` is KeyError."""
    payload = copy.deepcopy(REQUEST)
    target: Any = payload
    for step in path[:-1]:
        target = target[step]
    if to is KeyError:
        del target[path[-1]]
    else:
        target[path[-1]] = to
    return payload


@pytest.mark.parametrize(
    "change",
    [{"scope": "team:2"}, {"model_group": "large"}, {"epoch": 1}, {"guards": "a"}],
    ids=lambda c: next(iter(c)),
)
def test_every_component_of_the_partition_counts(change: dict[str, Any]) -> None:
    assert key(**change).partition != key().partition
    assert key(**change).exact != key().exact
    assert key(**change).context == key().context


@pytest.mark.parametrize(
    ("path", "to"),
    [
        (("messages", 0, "content"), "You are verbose."),
        (("messages", 0, "role"), "developer"),
        (("messages", 1, "content"), "Hey"),
        (("messages", 2, "content"), "Hello?"),
        (("messages", 3, "name"), "ann"),
        (("messages",), REQUEST["messages"][1:]),
        (("temperature",), 0.6),
        (("top_p",), 0.8),
        (("seed",), 8),
        (("stop",), ["\n"]),
        (("max_completion_tokens",), 200),
        (("response_format",), {"type": "text"}),
        (("tools", 0, "function", "name"), "listen"),
        (("tools",), KeyError),
        (("tool_choice",), "none"),
        (("presence_penalty",), 0.4),
        (("frequency_penalty",), 0.4),
        (("logit_bias",), {"50256": -99}),
        (("reasoning_effort",), "high"),
        (("top_k",), 41),
        (("a_field_nobody_knows",), 1),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_every_field_that_the_model_sees_or_obeys_counts(path: tuple[Any, ...], to: Any) -> None:
    other = key(changed(*path, to=to))
    assert other.context != key().context
    assert other.exact != key().exact
    assert other.partition == key().partition


@pytest.mark.parametrize("salt", ["one", "two", "o" * 128])
def test_a_salt_is_a_partition_of_its_own(salt: str) -> None:
    salted = key({**REQUEST, "cache_salt": salt})
    assert salted.partition not in (key().partition, key({**REQUEST, "cache_salt": "another"}).partition)
    assert salted.context == key().context
    assert key({**REQUEST, "cache_salt": None}) == key()


def test_a_salt_does_not_run_into_the_epoch() -> None:
    assert (
        key({**REQUEST, "cache_salt": "2"}, epoch=1).partition != key({**REQUEST, "cache_salt": "1"}, epoch=2).partition
    )
    assert key({**REQUEST, "cache_salt": "2"}, epoch=1).partition != key(epoch=12).partition


def test_rules_that_change_answers_are_a_partition_of_their_own() -> None:
    assert key(guards="a").partition != key(guards="b").partition
    assert key(guards="a").partition != key({**REQUEST, "cache_salt": "guards a"}).partition
    assert key({**REQUEST, "cache_salt": "s"}, guards="a").partition != key(guards="a").partition


def test_the_script_of_the_question_counts() -> None:
    assert key(changed("messages", 3, "content", to="Какая столица Франции?")).context != key().context


def test_the_last_user_text_counts_for_the_exact_digest_only() -> None:
    other = key(changed("messages", 3, "content", to="What's the capital of France?"))
    assert other.exact != key().exact
    assert (other.partition, other.context) == (key().partition, key().context)
    assert other.text == "What's the capital of France?"


def test_attachments_of_the_last_turn_count() -> None:
    def with_image(url: str) -> dict[str, Any]:
        parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
        return changed("messages", 3, "content", to=parts)

    first, second = key(with_image("data:image/png;base64,AAAA")), key(with_image("data:image/png;base64,AAAB"))
    assert first.context != second.context
    assert first.text == second.text == "What is this?"


@pytest.mark.parametrize(
    "field",
    [
        {"model": "the-name-that-was-asked-for"},
        {"stream": True},
        {"stream_options": {"include_usage": True}},
        {"user": "someone"},
        {"metadata": {"a": "b"}},
        {"store": True},
        {"service_tier": "flex"},
        {"safety_identifier": "x"},
        {"prompt_cache_key": "x"},
        {"n": 1},
        {"logprobs": False},
        {"top_logprobs": None},
        {"modalities": ["text"]},
    ],
    ids=lambda field: next(iter(field)),
)
def test_fields_of_transport_and_spelled_out_defaults_do_not_count(field: dict[str, Any]) -> None:
    assert key({**REQUEST, **field}) == key()


def test_two_spellings_of_one_request_have_one_key() -> None:
    spelled = copy.deepcopy(REQUEST)
    spelled["messages"][0]["content"] = [{"type": "text", "text": "You are terse."}]
    spelled["messages"][3]["content"] = [{"type": "text", "text": "What is the capital of France?"}]
    spelled["messages"][2]["refusal"] = None
    spelled["stop"] = "\n\n"
    spelled["max_tokens"] = spelled.pop("max_completion_tokens")
    spelled["top_k"] = 40.0
    assert key(dict(reversed(spelled.items()))) == key()


def test_at_temperature_zero_randomness_does_not_count() -> None:
    greedy = changed("temperature", to=0)
    reseeded = {**greedy, "seed": 99, "top_p": 0.1, "top_k": 1, "min_p": 0.2, "temperature": 0.0}
    assert key(reseeded) == key(greedy)


def test_space_around_and_line_ends_are_the_same_text_but_case_and_inner_space_are_not() -> None:
    def exact(text: str) -> str:
        return key(changed("messages", 3, "content", to=text)).exact

    assert exact(" a\r\nb ") == exact("a\nb")
    assert exact("Zoe\u0308") == exact("Zoë")
    assert exact("us") != exact("US")
    assert exact("if x:\n    y") != exact("if x:\n  y")


def test_a_conversation_that_ends_with_the_assistant_has_no_fuzzy_part() -> None:
    prefilled = changed("messages", to=[*REQUEST["messages"], {"role": "assistant", "content": "The"}])
    other = changed("messages", to=[*REQUEST["messages"], {"role": "assistant", "content": "A"}])
    assert key(prefilled).text == ""
    assert key(prefilled).context != key(other).context


def test_turns_do_not_run_together() -> None:
    def context(*contents: str) -> str:
        turns = [{"role": "user", "content": content} for content in contents]
        return key({"messages": [*turns, {"role": "user", "content": "x"}]}).context

    assert context("a", "b") != context("ab")
    assert context("a", "b") != context("b", "a")


def test_a_lone_surrogate_is_a_key_like_any_other() -> None:
    assert (
        key(changed("messages", 3, "content", to="\ud800")).exact
        != key(changed("messages", 0, "content", to="\ud800")).exact
    )


@pytest.mark.parametrize("payload", [{}, {"messages": []}, {"messages": "hello"}])
def test_a_request_without_messages_is_refused(payload: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="list of messages"):
        key(payload)


def test_an_empty_scope_is_refused() -> None:
    with pytest.raises(ValueError, match="scope"):
        key(scope="")


def test_the_version_is_part_of_every_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setattr(key_module, "VERSION", "another")
    after = key()
    assert before.partition != after.partition
    assert before.context != after.context
    assert before.exact != after.exact


def test_digests_are_the_same_everywhere() -> None:
    """A changed digest empties every cache in the field: do it on purpose, with a new VERSION."""
    made = build_key(
        {"model": "auto", "messages": [{"role": "user", "content": "Hi"}]},
        scope="team:1",
        model_group="auto",
    )
    assert (made.partition[:16], made.context[:16], made.exact[:16]) == (
        "dc28ccb632a3d1ad",
        "f9e03612ce79351b",
        "5b2320031e6ccd37",
    )


scopes = st.text(min_size=1, max_size=20)


@given(first=scopes, second=scopes, text=st.text(max_size=50), group=st.text(max_size=10))
def test_two_tenants_never_share_a_partition(first: str, second: str, text: str, group: str) -> None:
    payload = {"messages": [{"role": "user", "content": text}]}
    one = build_key(payload, scope=first, model_group=group)
    other = build_key(payload, scope=second, model_group=group)
    assert (one.partition == other.partition) == (first == second)
    assert (one.exact == other.exact) == (first == second)


@given(parts=st.tuples(scopes, scopes), cut=st.integers(0, 40))
def test_components_do_not_run_together(parts: tuple[str, str], cut: int) -> None:
    """Moving characters from the scope to the model group is another partition."""
    joined = "".join(parts)
    cut = 1 + cut % len(joined)
    payload = {"messages": [{"role": "user", "content": "x"}]}
    one = build_key(payload, scope=parts[0], model_group=parts[1])
    other = build_key(payload, scope=joined[:cut], model_group=joined[cut:])
    assert (one.partition == other.partition) == (parts == (joined[:cut], joined[cut:]))


# -- requests that mean the same share a key, others never do ----------------------------------------------------------

ABSENT = object()
# Per field, the groups of values that mean the same. What the model's defaults say is in DEFAULTS; a field that they
# do not name has a group for leaving it out, unless every server reads that alike.
DEFAULTS: dict[str, object] = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0, "max_completion_tokens": 64}
ALIKE_EVERYWHERE: dict[str, list[list[Any]]] = {
    "n": [[ABSENT, None, 1], [2]],
    "stop": [[ABSENT, None, []], ["x", ["x"]], [["x", "y"]], [["y", "x"]]],
    "frequency_penalty": [[ABSENT, 0, 0.0], [0.5]],
    "presence_penalty": [[ABSENT, 0, 0.0], [0.5]],
    "tools": [[ABSENT, []], [[{"type": "function", "function": {"name": "f", "strict": True}}]]],
    "response_format": [[ABSENT, {"type": "text"}], [{"type": "json_object"}]],
    "logprobs": [[ABSENT, False], [True]],
    "logit_bias": [[ABSENT, {}], [{"5": 1, "7": 2}], [{"5": 1}]],
    "seed": [[ABSENT, None], [1, 1.0], [2]],
    "user": [[ABSENT, "ann", "bob"]],
    "metadata": [[ABSENT, {}, {"a": "b"}]],
    "store": [[ABSENT, False]],
    "stream": [[ABSENT, False, True]],
    "stream_options": [[ABSENT, {"include_usage": True}]],
    "model": [["auto", "mock"]],
    "future_field": [[ABSENT, None], [0], [1]],
}
BY_MODEL: dict[str, list[list[Any]]] = {
    "temperature": [[0, 0.0], [0.7], [1, 1.0]],
    "top_p": [[1, 1.0], [0.5]],
    "top_k": [[0, -1], [40, 40.0]],
    "min_p": [[0, 0.0], [0.1]],
}
LIMITS: list[list[dict[str, Any]]] = [
    [{"max_tokens": 64}, {"max_completion_tokens": 64}, {"max_tokens": 64, "max_completion_tokens": 64}],
    [{"max_tokens": 9}, {"max_completion_tokens": 9}, {"max_completion_tokens": 9, "max_tokens": None}],
    [{"max_tokens": 64, "max_completion_tokens": 9}],
]
RANDOMNESS = {"top_p", "top_k", "min_p", "seed"}


def groups(known: bool) -> dict[str, list[list[Any]]]:
    """Fields with their groups; whether the model's defaults are known decides where leaving out belongs."""
    found: dict[str, list[list[Any]]] = {name: [list(group) for group in of] for name, of in ALIKE_EVERYWHERE.items()}
    for name, of in BY_MODEL.items():
        found[name] = [[*group, ABSENT] if known and DEFAULTS[name] in group else list(group) for group in of]
        if not known:
            found[name].append([ABSENT])
    found["limit"] = [[*LIMITS[0], {}], *LIMITS[1:]] if known else [*LIMITS, [{}]]
    return found


@st.composite
def requests(draw: st.DrawFn, meaning: dict[str, int], known: bool) -> dict[str, Any]:
    """A request of the given meaning (field to number of its group), in any spelling and any order of names."""
    payload: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": "x", "name": "n"}]
    }
    for name, of in groups(known).items():
        value = draw(st.sampled_from(of[meaning[name]]))
        if name == "limit":
            payload |= value
        elif value is not ABSENT:
            payload[name] = value
    shuffled = shuffle(payload, random.Random(draw(st.integers(0, 1000))))
    assert isinstance(shuffled, dict)
    return shuffled


def shuffle(value: object, order: random.Random) -> object:
    """The same JSON with the names of every object in another order."""
    if isinstance(value, dict):
        names = order.sample(list(value), len(value))
        return {name: shuffle(value[name], order) for name in names}
    return [shuffle(item, order) for item in value] if isinstance(value, list) else value


def meanings(known: bool) -> st.SearchStrategy[dict[str, int]]:
    return st.fixed_dictionaries({name: st.integers(0, len(of) - 1) for name, of in groups(known).items()})


def counts(meaning: dict[str, int], known: bool) -> dict[str, int]:
    """What counts of a meaning: at temperature 0, nothing that only steers chance."""
    greedy = 0 in groups(known)["temperature"][meaning["temperature"]]
    return {name: group for name, group in meaning.items() if not (greedy and name in RANDOMNESS)}


@given(data=st.data(), known=st.booleans())
def test_the_same_meaning_is_the_same_key_and_another_meaning_is_another(data: st.DataObject, known: bool) -> None:
    first = data.draw(meanings(known))
    # Often the same but for one field: two requests drawn apart are hardly ever alike.
    changes = data.draw(st.lists(st.sampled_from(sorted(first)), max_size=2))
    second = {**first, **{name: data.draw(st.integers(0, len(groups(known)[name]) - 1)) for name in changes}}
    defaults = DEFAULTS if known else None
    one = key(data.draw(requests(first, known)), defaults=defaults)
    other = key(data.draw(requests(second, known)), defaults=defaults)
    assert (one == other) == (counts(first, known) == counts(second, known))
    assert (one.exact == other.exact) == (one.context == other.context)


def test_a_changed_default_is_another_request() -> None:
    """An answer that was drawn at the old default must not pass for one at the new."""
    bare = {"messages": [{"role": "user", "content": "x"}]}
    assert key(bare, defaults={"temperature": 0}) == key({**bare, "temperature": 0}, defaults={"temperature": 1})
    assert key(bare, defaults={"temperature": 0}) != key(bare, defaults={"temperature": 1})


def test_an_unknown_default_is_nobodys() -> None:
    bare = {"messages": [{"role": "user", "content": "x"}]}
    assert key(bare) != key({**bare, "temperature": 0})
    assert key(bare) != key({**bare, "temperature": 1})
    assert key({**bare, "seed": 1}) != key(bare)
