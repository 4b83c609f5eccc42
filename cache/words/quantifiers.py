"""How many of them, and how often: "all" and "some", "most" and "few", "always" and "usually", "only".

An embedding takes these for small talk. Two texts that each name one, and not the same, say different things; where one
names none, nothing is known of what it means, except for "only", which changes what is asked wherever it stands.
English words and Chinese ones.
"""

from __future__ import annotations

import re

from cache.words import lexicon


def _set(listing: str) -> frozenset[str]:
    return frozenset(listing.split())


_AMOUNT = {
    "all": "all|every|each|everyone|everybody|everything|both",
    "most": "most of|the majority of|a majority of|almost all|almost every|nearly all|nearly every",
    "many": "many|several|numerous|multiple|lots of|a lot of|plenty of",
    "some": "some|someone|somebody|something|a few|some of",
    "few": "few|very few|only a few|hardly any|barely any|scarcely any",
    "any": "any|anyone|anybody|anything|either",
}
_FREQUENCY = {
    "always": "always|every time|at all times|constantly",
    "usually": "usually|normally|generally|typically|most of the time|as a rule",
    "often": "often|frequently|regularly",
    "sometimes": "sometimes|occasionally|at times|now and then|from time to time|once in a while",
    "rarely": "rarely|seldom|infrequently|hardly ever|scarcely ever",
    "never": "never|not ever",
}
_BOUND = {
    "at least": "at least|no less than|no fewer than|a minimum of",
    "at most": "at most|up to|no more than|a maximum of",
}
_ONLY = {"only": "only|solely|exclusively|nothing but|none but"}
# These hold one of the words above and say nothing of how many.
_NOTHING = (
    "at all|after all|above all|first of all|all right|all in all|all in one|each other|either way|either side|"
    "how many|as many|so many|too many|how often|as often|any more|anything else|in any case|the only|not only|if only|"
    "something like|something else|most of all"
)
_KIND_OF = {
    **{tuple(phrase.split()): "" for phrase in _NOTHING.split("|")},
    **{
        tuple(phrase.split()): kind
        for family in (_AMOUNT, _FREQUENCY, _BOUND, _ONLY)
        for kind, phrases in family.items()
        for phrase in phrases.split("|")
    },
}
_FAMILIES = (frozenset(_AMOUNT), frozenset(_FREQUENCY), frozenset((*_BOUND, "exactly")))
_LONGEST = max(map(len, _KIND_OF))
# "most" in front of a noun; behind these, or in front of an adjective, it is the superlative.
_SUPERLATIVE_BEHIND = _set("the a an at is are was were my your his her its our their which what 's")
_EXACTLY = frozenset(("exactly", "precisely"))
_PLURAL = re.compile(r"[^\W\d_]{3,}(?<![su])s$|^(?:people|men|women|children)$")
# Near enough to be said for one another.
_ALIKE = frozenset(map(frozenset, (("some", "any"), ("some", "many"))))

_CHINESE = {
    "all": r"所有|全部|全体|全都|全额|一切|人人|每(?!年|月|天|日|周|星期|次|当)",
    "most": r"绝?大(?:部分|多数)|(?<!少)多数",
    "some": r"(?<!大)一?部分|(?<!所)(?:有些|有的(?!时)|有人)|某些|若干",
    "few": r"极?少数|少量",
    "any": r"任何|任意",
    "always": r"总是|永远|每次|一向",
    "usually": r"通常|一般|平时|往往",
    "often": r"经常|常常|时常",
    "sometimes": r"有时|偶尔",
    "rarely": r"很少|极少(?!数)|难得",
    "only": r"(?<![一二两三四五六七八九十百几每这那\d])只(?!是|要|不过)|仅|唯有",
}
_IN_CHINESE = {kind: re.compile(pattern) for kind, pattern in _CHINESE.items()}


def quantifiers(spoken: tuple[str, ...]) -> frozenset[str]:
    """The kinds of quantifier among the words of an English text: `all`, `some`, `usually`, `only` …"""
    found = set()
    at = 0
    while at < len(spoken):
        length = next(
            (size for size in range(min(_LONGEST, len(spoken) - at), 0, -1) if spoken[at : at + size] in _KIND_OF), 0
        )
        if length:
            found.add(_KIND_OF[spoken[at : at + length]])
        elif spoken[at] == "most" and _counts(spoken, at):
            found.add("most")
        elif spoken[at] in _EXACTLY and _is_number(spoken[at + 1 : at + 2]):
            found.add("exactly")
        at += max(length, 1)
    return frozenset(found - {""})


def chinese_quantifiers(text: str) -> frozenset[str]:
    """The same of a Chinese text."""
    return frozenset(kind for kind, pattern in _IN_CHINESE.items() if pattern.search(text))


def conflict(one: frozenset[str], other: frozenset[str]) -> bool:
    """Whether two texts with these quantifiers speak of different amounts. Symmetric."""
    if ("only" in one) != ("only" in other):
        return True
    return any(
        frozenset((mine, theirs)) not in _ALIKE
        for family in _FAMILIES
        for mine in (one - other) & family
        for theirs in (other - one) & family
    )


def _is_number(words: tuple[str, ...]) -> bool:
    return any(word == "one" or word in lexicon.NUMBER_WORDS or word[0].isdigit() for word in words)


def _counts(spoken: tuple[str, ...], at: int) -> bool:
    """Whether a "most" counts things, as in "do most cats like milk"."""
    behind = spoken[at - 1] if at else ""
    following = spoken[at + 1] if at + 1 < len(spoken) else ""
    return behind not in _SUPERLATIVE_BEHIND and bool(_PLURAL.match(following))
