"""Who does what to whom: whether two texts hold the same words in other roles.

"km to miles" and "miles to km" swap what one relation governs; "does a manager have an employee" and "does an employee
have a manager" swap sides of a word between. What a change of construction explains is no swap: "in Japan who rules"
(the phrase moved as a whole), "router password" for "password of the router", "the tower was built".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

import msgspec

from cache.words import lexicon
from cache.words.relations import LOOSE, Relation, governors

# In longer texts, two words may change places for many a reason; such texts are compared as a whole.
_MOST_WORDS = 32
_LONGEST_COMPOUND = 3
_CAUSING = frozenset({"have", "has", "had", "having", "get", "gets", "getting", "want", "need", "like"})
_FORMS_OF_BE = frozenset({"is", "are", "am", "was", "were", "be", "been", "being"})


class Order(msgspec.Struct, frozen=True):
    """What is compared: the stems of the content words, each with its place, and the relations."""

    spoken: tuple[str, ...]
    content: tuple[str, ...]
    relations: tuple[Relation, ...]


def swapped(first: Order, second: Order) -> bool:
    """Whether words that both texts hold play each other's roles. Symmetric."""
    if _governed_swapped(first, second):
        return True
    return _sides_swapped(first, second)


def _governed_swapped(first: Order, second: Order) -> bool:
    """Whether the same relation governs different words, each of which the other text holds too.

    Where the relation is loose ("in", "of"), only if the two words have changed places: "in spring in Rome".
    """
    for kind, one in _by_kind(first).items():
        other = _by_kind(second).get(kind, frozenset())
        for word in one - other:
            for instead in other - one:
                both = word in second.content and instead in first.content
                if both and (kind not in LOOSE or _before(first, word, instead) != _before(second, word, instead)):
                    return True
    return False


def _by_kind(order: Order) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for relation in order.relations:
        found[relation.kind] = found.get(relation.kind, frozenset()) | set(relation.governs)
    if "asked" in found:
        found["asked"] -= lexicon.LIGHT
    return found


def _before(order: Order, word: str, other: str) -> bool:
    return order.content.index(word) < order.content.index(other)


def _sides_swapped(first: Order, second: Order) -> bool:
    shared = _single(first) & _single(second)
    one = [word for word in first.content if word in shared]
    place = {word: i for i, word in enumerate(word for word in second.content if word in shared)}
    if len(one) > _MOST_WORDS:
        return [place[word] for word in one] != sorted(place.values())
    if _is_passive(first) != _is_passive(second) and len(one) > 1:
        return next(_inverted(one, place), None) is None
    turned = any(place[a] > place[b] > place[c] for a, b, c in combinations(one, 3))
    if turned or _has_be(first) != _has_be(second):
        return turned
    return any(not _explained(first, second, x, y) for x, y in _inverted(one, place))


def _single(order: Order) -> frozenset[str]:
    """Words that stand once in the text; adverbs of manner, which may stand anywhere, aside."""
    counts = Counter(order.content)
    return frozenset(word for word, count in counts.items() if count == 1 and not word.endswith("ly"))


def _inverted(one: list[str], place: dict[str, int]) -> Iterator[tuple[str, str]]:
    return ((x, y) for x, y in combinations(one, 2) if place[x] > place[y])


def _explained(first: Order, second: Order, x: str, y: str) -> bool:
    """Whether a change of construction makes `x ... y` of the first text `y ... x` in the second."""
    one, other = governors(first.relations), governors(second.relations)
    for word, fellow in ((x, y), (y, x)):
        same = word in one and word in other and one[word][0] == other[word][0]
        if same and one.get(fellow) != one[word] and other.get(fellow) != other[word]:
            return True  # the phrase moved as a whole
    return any(
        _is_compound(here, there, before, after) or _is_causative(here, before, after)
        for here, there, before, after in ((first, second, x, y), (second, first, y, x))
    )


def _is_compound(compound: Order, phrase: Order, x: str, y: str) -> bool:
    """Whether `x y` stand side by side in one text where the other says "y of x" or "y is x"."""
    stems = _stems(compound)
    start, end = stems.index(x), stems.index(y)
    if not start < end <= start + _LONGEST_COMPOUND or any(stem not in compound.content for stem in stems[start:end]):
        return False
    governor = governors(phrase.relations).get(x)
    if governor is not None and (governor[0] in LOOSE or governor[0] == "source"):
        return True
    other = _stems(phrase)
    return bool(_FORMS_OF_BE.intersection(phrase.spoken[other.index(y) : other.index(x)]))


def _is_causative(order: Order, x: str, y: str) -> bool:
    """Whether `x ... y` is "have the oil changed", where the other text says "change the oil"."""
    end = _stems(order).index(y)
    return order.spoken[end].endswith("ed") and bool(_CAUSING.intersection(order.spoken[:end]))


def _stems(order: Order) -> list[str]:
    return [lexicon.stem(word) for word in order.spoken]


def _has_be(order: Order) -> bool:
    return bool(_FORMS_OF_BE.intersection(order.spoken))


def _is_passive(order: Order) -> bool:
    return any(relation.kind == "by" and relation.governs for relation in order.relations)
