"""Word lists behind the guards of `guards.py`: opposites, negations, units, courtesy, function words.

Small on purpose: each list holds a closed class of English or the commonest members of an open one. A word that is
missing costs a wrong hit only where the embedding, too, takes the two texts for nearly the same.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise


def _list(listing: str) -> list[str]:
    return listing.split()


def _set(listing: str) -> frozenset[str]:
    return frozenset(listing.split())


NEGATIONS = _set(
    "not no never none nobody nothing nowhere neither nor without hardly barely scarcely "
    "except excluding lack lacks lacking fail fails failed refuse refuses avoid avoids"
)

_OPPOSITE_PAIRS = _set("""
on/off up/down in/out open/close open/shut opened/closed start/stop start/end begin/end enable/disable
enabled/disabled allow/forbid allow/block allow/deny allow/prevent accept/reject accept/decline accepted/rejected
accepted/declined approve/reject approve/deny increase/decrease increase/reduce increasing/decreasing raise/lower
raise/reduce add/remove add/delete add/subtract insert/delete create/delete create/destroy install/uninstall
buy/sell buying/selling bought/sold borrow/lend send/receive sending/receiving sent/received deposit/withdraw
import/export upload/download push/pull lock/unlock encrypt/decrypt encode/decode connect/disconnect mount/unmount
login/logout log-in/log-out activate/deactivate activate/cancel subscribe/unsubscribe follow/unfollow like/dislike
love/hate win/lose won/lost pass/fail passed/failed succeed/fail success/failure gain/lose profit/loss before/after
above/below over/under inside/outside upstream/downstream north/south east/west left/right front/back top/bottom
first/last early/late earlier/later earliest/latest newest/oldest new/old newer/older young/old younger/older
big/small bigger/smaller biggest/smallest large/small larger/smaller largest/smallest great/little high/low
higher/lower highest/lowest long/short longer/shorter longest/shortest tall/short taller/shorter tallest/shortest
wide/narrow deep/shallow thick/thin heavy/light heavier/lighter heaviest/lightest fat/thin strong/weak
stronger/weaker strongest/weakest hard/easy hard/soft difficult/easy harder/easier hardest/easiest fast/slow
faster/slower fastest/slowest quick/slow quickly/slowly hot/cold hotter/colder hottest/coldest warm/cool warm/cold
wet/dry dark/light bright/dark rich/poor richer/poorer cheap/expensive cheaper/dearer cheapest/dearest
cheapest/expensive good/bad better/worse best/worst right/wrong correct/incorrect true/false positive/negative
pro/con pros/cons for/against advantage/disadvantage advantages/disadvantages benefit/risk benefits/risks
benefits/drawbacks strength/weakness strengths/weaknesses more/less more/fewer most/least many/few much/little
max/min maximum/minimum maximize/minimize maximise/minimise upper/lower always/never always/sometimes all/none
all/some everyone/nobody everything/nothing full/empty dead/alive alive/dead live/dead born/died birth/death
male/female man/woman men/women boy/girl father/mother son/daughter brother/sister husband/wife king/queen
uncle/aunt day/night morning/evening summer/winter spring/autumn past/future today/tomorrow today/yesterday
yesterday/tomorrow input/output source/target source/destination client/server parent/child ancestor/descendant
public/private internal/external domestic/international local/remote indoor/outdoor arrive/depart arrival/departure
come/go arriving/departing enter/exit enter/leave entrance/exit ascending/descending horizontal/vertical odd/even
single/married single/double gross/net debit/credit asset/liability supply/demand cause/effect legal/illegal
safe/dangerous safe/unsafe happy/sad hungry/full awake/asleep clean/dirty sweet/sour loud/quiet smooth/rough
simple/complex ancient/modern include/exclude including/excluding with/without present/absent attack/defend
attack/defense teach/learn ask/answer question/answer hire/fire fix/break build/destroy remember/forget save/spend
save/delete show/hide visible/hidden sync/async synchronous/asynchronous static/dynamic manual/automatic
primary/secondary major/minor cheapest/priciest morning/afternoon morning/night afternoon/evening afternoon/night
pause/resume paused/resumed buyer/seller buyers/sellers landlord/tenant plaintiff/defendant customer/supplier
lender/borrower host/guest winner/loser incoming/outgoing freeze/thaw bull/bear acid/base immigrate/emigrate
immigration/emigration introvert/extrovert optimist/pessimist
""")
_OPPOSITES: dict[str, frozenset[str]] = {}
for _pair in _OPPOSITE_PAIRS:
    _left, _right = _pair.split("/")
    _OPPOSITES[_left] = _OPPOSITES.get(_left, frozenset()) | {_right}
    _OPPOSITES[_right] = _OPPOSITES.get(_right, frozenset()) | {_left}
# Where one word begins with the first and another, otherwise the same, with the second, they are opposites.
_OPPOSITE_BEGINNINGS = (
    ("hyper", "hypo"), ("over", "under"), ("pre", "post"), ("in", "out"), ("up", "down"), ("intro", "extro"),
    ("intra", "inter"), ("macro", "micro"), ("im", "ex"), ("in", "ex"), ("in", "de"), ("pro", "de"),
)  # fmt: skip
# Likewise ends: who does it, and to whom it is done.
_OPPOSITE_ENDS = (("er", "ee"), ("or", "ee"))
_SHORTEST_STEM = 3
_NEGATING_PREFIXES = ("un", "in", "im", "il", "ir", "non", "dis", "de", "mis", "anti", "non-", "anti-")

_IRREGULAR_PLURALS = dict(
    pair.split("/")
    for pair in _list("""
        men/man women/woman children/child people/person feet/foot teeth/tooth mice/mouse geese/goose oxen/ox
        wolves/wolf knives/knife wives/wife halves/half shelves/shelf thieves/thief loaves/loaf calves/calf data/datum
        criteria/criterion phenomena/phenomenon indices/index matrices/matrix vertices/vertex analyses/analysis
        crises/crisis theses/thesis cacti/cactus fungi/fungus buses/bus gases/gas lenses/lens viruses/virus
        statuses/status
    """)
)
NUMBER_WORDS = {
    **{word: str(i) for i, word in enumerate(_list("zero one two three four five six seven eight nine ten"))},
    **{word: str(i) for i, word in enumerate(_list("eleven twelve thirteen fourteen fifteen"), 11)},
    **{word: str(i) for i, word in enumerate(_list("sixteen seventeen eighteen nineteen twenty"), 16)},
    **{word: str(i) for i, word in enumerate(_list("second third fourth fifth sixth seventh eighth ninth tenth"), 2)},
    "thirty": "30",
    "forty": "40",
    "fifty": "50",
    "sixty": "60",
    "seventy": "70",
    "eighty": "80",
    "ninety": "90",
    "hundred": "100",
    "thousand": "1000",
    "million": "1000000",
    "billion": "1000000000",
    "dozen": "12",
    "twice": "2",
    "double": "2",
    "once": "1",
    "half": "0.5",
    "quarter": "0.25",
}
# "one" stands for a thing as often as for a number ("a new one").
del NUMBER_WORDS["one"]

_UNIT_GROUPS = """
km kilometer kilometers kilometre kilometres|mile miles mi|m meter meters metre metres|mm millimeter millimeters|
cm centimeter centimeters centimetre centimetres|foot feet ft|inch inches|yard yards|kg kilo kilos kilogram kilograms|
g gram grams|mg milligram milligrams|lb lbs pound pounds|ounce ounces oz|ton tons tonne tonnes|
l liter liters litre litres|ml milliliter milliliters millilitre millilitres|gallon gallons|pint pints|cup cups|
celsius centigrade|fahrenheit|kelvin|second seconds sec|minute minutes mins|hour hours hr hrs|day days daily|
week weeks weekly|month months monthly|year years yearly annual annually|decade decades|century centuries|
kb kilobyte kilobytes|mb megabyte megabytes|gb gigabyte gigabytes|tb terabyte terabytes|byte bytes|
dollar dollars usd|euro euros eur|gbp sterling|yen jpy|yuan rmb cny|rupee rupees inr|cent cents|
percent percentage pct|watt watts|kwh|volt volts|amp amps ampere amperes|joule joules|calorie calories|hz hertz|
mph|kmh|knot knots|acre acres|hectare hectares ha|
monday mondays|tuesday tuesdays|wednesday wednesdays|thursday thursdays|friday fridays|saturday saturdays|
sunday sundays|january jan|february feb|march|april apr|june jun|july jul|august aug|september sep sept|october oct|
november nov|december dec
"""
UNITS: dict[str, str] = {}
for _group in _UNIT_GROUPS.replace("\n", " ").split("|"):
    _names = _group.split()
    UNITS.update(dict.fromkeys(_names, _names[0]))

# Whose: "my name" and "your name" are different things; "my PIN" and "the PIN" mostly are not.
PERSONS = {
    **dict.fromkeys(_list("i me my mine myself we us our ours"), "first"),
    **dict.fromkeys(_list("you your yours yourself"), "second"),
    **dict.fromkeys(_list("he him his himself"), "he"),
    **dict.fromkeys(_list("she her hers herself"), "she"),
    **dict.fromkeys(_list("they them their theirs"), "they"),
}
_SUBJECTS = _set("i you we they he she it")
_AUXILIARIES = _set("is are am was were do does did has have had can could will would shall should may might must not")
PAST = _set("was were")
PRESENT = _set("is are am")
OBLIGATION = _set("must should shall ought need")
ABILITY = _set("can could may might")
FUNCTION_WORDS = _set("""a an the this that these those there here it its itself one ones some any such same other
    i me my mine myself we us our ours you your yours yourself he him his she her hers they them their theirs
    am is are was were be been being do does did done doing have has had having will would shall should can could
    may might must ought need needs let get gets got getting go goes going
    of in on at by for to from with without into onto about as than over under up down off out through via between
    during     and or but if so then because while when where why who whom whose which what how whether not no
    please kindly thanks thank hi hello hey want wants like wish know tell say show explain give help ask
    just also too very really actually exactly really quite only even still yet already now again ever
    before after during until till since above below within inside outside between beneath underneath toward towards
    beyond among amongst beside behind across amid throughout whilst prior per versus vs
    'm 're 've 'll 'd 's t s d ll ve re m seems seem looks look""")
# Words of category: "the capital", "the capital city", "which city is the capital". Ignored on one side alone.
LIGHT = _set("city place name person thing way word term type kind sort step steps process")

_COURTESY = re.compile(
    r"^(?:(?:hi|hello|hey|hi there|good morning|good day|please|kindly|ok|okay|so|well) )*"
    r"(?:(?:can|could|would|will) (?:you|anyone|someone|somebody) (?:please |kindly |also )?"
    r"(?:tell|show|explain|give|help|let|remind|inform|teach|advise)"
    r"(?: to)?(?: (?:me|us))?(?: know)?(?: understand)?(?: about)? "
    r"|(?:please )?(?:tell|show|explain|remind|inform|teach) (?:to )?(?:me|us) (?:about )?"
    r"|(?:do|does) (?:you|anyone|someone|somebody) (?:happen to )?know "
    r"|i (?:am|was) (?:just )?(?:wondering|curious)(?: about| if you (?:can|could) tell me)? "
    r"|i (?:would like|want|need|would love|wish) to (?:know|find out|understand|learn) (?:about )?"
    r"|explain |please )"
)
_COURTESY_END = re.compile(r"(?: (?:please|thanks|thank you|cheers|for me|or not))+$")
_TAG_QUESTION = re.compile(
    r",\s*(?:is|are|am|was|were|do|does|did|have|has|had|can|could|will|would|should|wo|ca)(?:n['’]?t)?\s+"
    r"(?:i|you|he|she|it|we|they|there)(?:\s+not)?\s*[?!.]*\s*$",
    re.IGNORECASE,
)
_GENERIC_YOU = re.compile(r"\b(how|where|when) (do|can|could|should|would) you\b")


def without_tag(text: str) -> str:
    """A text without its tag question: "They're safe, aren't they?" asks the same as "They're safe"."""
    return _TAG_QUESTION.sub("", text)


def without_courtesy(spoken: tuple[str, ...]) -> tuple[str, ...]:
    """Words without their polite frame: "could you tell me what the capital is please" is "what the capital is".

    The two sides of "and" and "or" are put in alphabetical order, because they say the same either way round.
    """
    sentence = _COURTESY_END.sub("", _COURTESY.sub("", " ".join(spoken)))
    core = _GENERIC_YOU.sub(r"\1 \2 i", sentence).split() or list(spoken)
    for i in range(1, len(core) - 1):
        right = i + 2 if core[i + 1] in ("a", "an", "the") and i + 2 < len(core) else i + 1
        if core[i] in ("and", "or") and core[i - 1] > core[right]:
            core[i - 1], core[right] = core[right], core[i - 1]
    return tuple(core)


def question_of(spoken: tuple[str, ...]) -> str | None:
    """What a question asks for, where its first words say so: who, when, where, why, how, how many, how long ...

    None for statements and for what and which, which can ask for any of these.
    """
    for i, word in enumerate(spoken[:3]):
        following = spoken[i + 1] if i + 1 < len(spoken) else ""
        if word == "how" and following == "much" and spoken[i + 2 : i + 3] == ("longer",):
            return "how long"
        if word == "how" and following in ("many", "much"):
            return "how many"
        if word == "how" and following in ("long", "old", "far", "often", "tall", "big", "high", "deep", "fast"):
            return f"how {following}"
        if word in ("what", "which") and following in ("time", "date", "year", "day"):
            return "when"
        if word in ("who", "whom", "whose"):
            return "who"
        if word in ("when", "where", "why", "how"):
            return word
        if word in ("what", "which"):
            return None
    return None


def form_of(spoken: tuple[str, ...]) -> str:
    """How a text asks: why, how, when ...; `yes_or_no`, `statement`; `what` also for a bare "capital of France"."""
    kind = question_of(spoken)
    if kind:
        return kind
    if {"what", "which"}.intersection(spoken[:3]):
        return "what"
    if spoken[:1] and spoken[0] in _AUXILIARIES:
        return "yes_or_no"
    return (
        "statement"
        if {"i", "my", "we", "our", "it"}.intersection(spoken) or _AUXILIARIES.intersection(spoken)
        else "what"
    )


def asked_unit(spoken: tuple[str, ...]) -> str | None:
    """The unit that the question asks in: `year` for "in what year ..."."""
    for before, word in pairwise(spoken):
        if before in ("what", "which") and word in UNITS:
            return UNITS[word]
    return None


def tense_of(tokens: frozenset[str]) -> str | None:
    """`past` or `now` where a form of "to be", "did" or "will" says so alone; None when nothing or both do."""
    if tokens & PRESENT or "will" in tokens:
        return None if tokens & PAST or "did" in tokens else "now" if tokens & PRESENT else "future"
    if tokens & PAST:
        return "past"
    return "did" if "did" in tokens else None


def possession_of(spoken: tuple[str, ...]) -> str | None:
    """`has` for what is had ("how many days do I have"), `done` for what has been done ("how many have I taken")."""
    for i, word in enumerate(spoken):
        if word in ("have", "has") and spoken[i + 1 : i + 2] and spoken[i + 1] in _SUBJECTS:
            return None if "got" in spoken else "done"
    return "has" if spoken[-1:] in (("have",), ("has",)) or spoken[-2:] == ("have", "left") else None


def modality_of(spoken: tuple[str, ...]) -> str | None:
    """Whether a yes-or-no question asks for an obligation ("Must I ...") or a possibility ("Can I ...")."""
    opening = spoken[:1]
    if opening == ("do",) and spoken[2:3] and spoken[2] in ("need", "have"):
        return "obligation"
    if opening and opening[0] in OBLIGATION:
        return "obligation"
    return "possibility" if opening and opening[0] in ABILITY else None


def speakers_of(spoken: tuple[str, ...]) -> tuple[str, ...]:
    """Whom the pronouns name, in order of first mention: "can I call you" is not "can you call me"."""
    return tuple(dict.fromkeys(PERSONS[word] for word in spoken if word in PERSONS))


def _changed(word: str, other: str) -> bool:
    """Whether the two are one stem with opposite beginnings or ends."""
    stems = [
        (word[len(one) :], other[len(two) :])
        for one, two in _OPPOSITE_BEGINNINGS
        if word.startswith(one) and other.startswith(two)
    ]
    stems += [
        (word[: -len(one)], other[: -len(two)])
        for one, two in _OPPOSITE_ENDS
        if word.endswith(one) and other.endswith(two)
    ]
    return any(mine == its and len(mine) >= _SHORTEST_STEM for mine, its in stems)


@lru_cache(maxsize=16_384)
def stem(word: str) -> str:
    """A word without its commonest English endings. Rough on purpose: used to compare, never to show."""
    word = _IRREGULAR_PLURALS.get(word, word)
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("sses", "shes", "ches", "xes", "zes")):
        return word[:-2]
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return stem(word[:-1])
    for ending in ("ing", "ed"):
        root = word[: -len(ending)]
        if word.endswith(ending) and len(root) >= 3 and re.search(r"[aeiouy]", root):
            if root[-1] == root[-2] and root[-1] not in "lsz":
                root = root[:-1]
            return _without_e(root)
    return _without_e(word)


def _without_e(word: str) -> str:
    if len(word) > 3 and word.endswith("ied"):
        return word[:-3] + "y"
    if len(word) > 3 and word.endswith("i"):
        return word[:-1] + "y"
    if len(word) > 4 and word.endswith("ie"):
        return word[:-2] + "y"  # "movie", whose plural reads like that of "city"
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


def opposite(word: str, other: str) -> bool:
    """Whether two words are listed opposites or one is the other with a negating prefix or suffix."""
    if other in _OPPOSITES.get(word, ()) or _changed(word, other) or _changed(other, word):
        return True
    short, long = sorted((word, other), key=len)
    if len(short) >= 3 and any(long == prefix + short for prefix in _NEGATING_PREFIXES):
        return True
    return len(long) > 6 and long.endswith("less") and short in (long[:-4] + "ful", long[:-4])
