"""Whether one text asks about a narrower thing: "the population of york" and of "new york", "apple" and "apple pie".

A word that only one text holds, in one noun phrase with a word that both hold, makes another thing of it: in front
("democratic republic", "router password") or as its new head ("apple pie", "guinea bissau", "the gulf of mexico").
Names typed without capitals are the worst of it, because nothing else tells them. Words that are no part of the phrase
add no more than detail or courtesy: a verb ("find flights"), an adverb in -ly, a word of degree ("the best way").

No list of names: what counts is where the added word stands.
"""

from __future__ import annotations

from cache.words import lexicon
from cache.words.relations import is_infinitive


def _set(listing: str) -> frozenset[str]:
    return frozenset(listing.split())


# In front of a noun, these say how much, how well or how certainly, and name no other thing.
_LIGHT_MODIFIERS = _set(
    "best good easiest simplest exact precise actual real correct proper right official full whole entire overall "
    "specific particular certain own usual normal typical general common basic different various main possible "
    "available necessary required several both either every each another more extra additional many much few bit "
    "pretty using existing"
)
# Behind a noun, these are its verb, or say that it is so: "how long does delivery take" beside "how long is delivery".
_LIGHT_VERBS = _set(
    "take takes took cost costs work works happen happens mean means last lasts use uses require requires provide "
    "provides stay stays remain remains say says keep keeps occur occurs contain contains exist exists safe legal "
    "normal bad good broken option options anywhere somewhere anymore soon anyway anyways"
)
_ADDS_NOTHING = _LIGHT_MODIFIERS | _LIGHT_VERBS | lexicon.LIGHT
_REQUESTS = _set(
    "list name describe define find search check compare summarize summarise discuss outline state identify book "
    "order buy make set play add remove change read see view calculate compute convert provide suggest recommend "
    "write create"
)
_SUBJECTS = _set("i you we they he she it me us them him her not please just also to")
_AUXILIARIES = _set("do does did can could will would should shall may might must 'll 'd ll d")
_NAMING = _set("of in at from near for to")
_ARTICLES = _set("a an the")
_BEHIND_A_PHRASE = _NAMING | _set("is are was were has have had on with and or than")


def narrowed(first: tuple[str, ...], second: tuple[str, ...]) -> bool:
    """Whether words that one of two texts adds, and the other does not replace, narrow a thing that both name.

    Args:
        first: the words of a text, lower case, in order; `second` likewise. Symmetric.
    """
    ours, theirs = _stems(first), _stems(second)
    only_first, only_second = ours - theirs, theirs - ours
    shared = ours & theirs
    return (only_second <= lexicon.LIGHT and _narrows(first, only_first, shared)) or (
        only_first <= lexicon.LIGHT and _narrows(second, only_second, shared)
    )


def _stems(spoken: tuple[str, ...]) -> frozenset[str]:
    return frozenset(lexicon.stem(word) for word in spoken if word not in lexicon.FUNCTION_WORDS and word != "'s")


def _narrows(spoken: tuple[str, ...], added: frozenset[str], shared: frozenset[str]) -> bool:
    i = 0
    while i < len(spoken):
        if lexicon.stem(spoken[i]) not in added:
            i += 1
            continue
        end = i
        while end < len(spoken) and lexicon.stem(spoken[end]) in added:
            end += 1
        before = lexicon.stem(spoken[i - 1]) if i else ""
        after = lexicon.stem(spoken[end]) if end < len(spoken) else ""
        if after in shared and _modifies(spoken, i, end):
            return True
        if before in shared and after not in shared and _heads(spoken, i, end):
            return True
        if _of_which(spoken, i, end, shared):
            return True
        i = end
    return False


def _modifies(spoken: tuple[str, ...], start: int, end: int) -> bool:
    """Whether the added words [start, end), with a shared word right behind them, are modifiers of it."""
    if _is_verb(spoken, start):
        start += 1
    return any(word not in _ADDS_NOTHING and not word.endswith("ly") for word in spoken[start:end])


def _heads(spoken: tuple[str, ...], start: int, end: int) -> bool:
    """Whether the added words [start, end), with a shared word right before them, are the head of its phrase."""
    word = spoken[end - 1]
    if word in _LIGHT_VERBS or word.endswith(("ly", "ed", "ing")):
        return False
    begin = start
    while begin and spoken[begin - 1] not in lexicon.FUNCTION_WORDS and spoken[begin - 1] != "'s":
        begin -= 1
    named = begin > 0 and spoken[begin - 1] in _NAMING
    closed = end == len(spoken) or spoken[end] in _BEHIND_A_PHRASE
    return named if word in lexicon.LIGHT else named or closed


def _of_which(spoken: tuple[str, ...], start: int, end: int, shared: frozenset[str]) -> bool:
    """Whether the added words [start, end) are what is meant, of a shared word: "in the gulf of mexico"."""
    before = start - 1 - (start > 0 and spoken[start - 1] in _ARTICLES)
    behind = end + 1 + (end + 1 < len(spoken) and spoken[end + 1] in _ARTICLES)
    return (
        spoken[end : end + 1] == ("of",)
        and before >= 0
        and spoken[before] in _NAMING
        and behind < len(spoken)
        and lexicon.stem(spoken[behind]) in shared
        and not _ADDS_NOTHING.issuperset(spoken[start:end])
    )


def _is_verb(spoken: tuple[str, ...], i: int) -> bool:
    """Whether a word stands where a verb does: first in a request, behind a subject, "to" or "I can"."""
    if i == 0:
        return spoken[0] in _REQUESTS
    before = spoken[i - 1]
    if before == "to":
        return is_infinitive(spoken, i - 1)
    return before in _SUBJECTS or (before in _AUXILIARIES and i > 1 and spoken[i - 2] in _SUBJECTS)
