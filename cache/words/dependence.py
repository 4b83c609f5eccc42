"""What an answer depends on beside the words of its question: the time of asking, and who asks.

Neither may be answered from a cache that knows nothing of it. Telling when something happened is no question about the
time ("I paid yesterday and it is still pending"), and asking how to change one's address is none about the address:
many ask so, and all get the same answer. Both rules look for words that ask; in doubt the answer depends.

Everything here is linear in the length of the text, whatever it says: others wait meanwhile.
"""

from __future__ import annotations

import re

from cache.words.chinese import is_chinese

# Searched for in lower case, which is several times faster than ignoring case.
_NOW = re.compile(
    r"\b(?:tonight|nowadays|currently|latest|newest|upcoming|at present|these days|as of|up[ -]to[ -]date|"
    r"(?:this|last|next) (?:second|minute|afternoon)|(?:this|next) (?:hour|evening|night|weekend|month|quarter|"
    r"year|season)|next (?:morning|day|week)|"
    r"(?:this|last|next|past) (?:monday|tuesday|wednesday|thursday|friday|saturday|sunday)|"
    r"breaking news|the news|headlines|weather|(?:what|which) (?:time|day|date|year|month) is|"
    r"what(?:'s| is) the (?:time|date|day)|stock price|share price|price of (?:bitcoin|gold|oil)|score of|how long ago|"
    r"(?<!electric )(?<!alternating )(?<!direct )(?<!ocean )(?<!my )(?<!your )current(?! accounts?\b(?! balance))|"
    r"aujourd'hui|heute|hoy|oggi|hoje|vandaag)\b"
)
# These ask about the time, unless they tell when something happened.
_WHEN = re.compile(
    r"\b(?:now(?! that\b)|today|tomorrow|yesterday|lately|recent|recently|so far|at the moment|"
    r"this (?:morning|week)|(?:last|past) (?:hour|morning|evening|night|day|week|weekend|month|quarter|year|season)|"
    r"\d+ (?:minutes|hours|days|weeks|months|years) ago|(?:my|your) current(?! accounts?\b(?! balance)))\b"
)
# Said without any time in mind.
_IDIOM = re.compile(
    r"\bwhat (?:do|should|can|must|could|would|shall|to) (?:(?:i|we|you) )?(?:do )?(?:right )?now\b|"
    r"\bwhat now\b|\bfrom now on\b"
)
_RATE = re.compile(r"\bexchange rate\b")
# A rate that is explained or complained of is not asked for.
_NO_RATE_ASKED = re.compile(
    r"\b(?:determin|decid|calculat|comput|com(?:e|es|ing) from|source|based|wrong|incorrect|inaccurate|unfair|"
    r"different|bad\b|off\b|mistake|(?:not|n't) (?:been )?(?:right|correct|accurate|what|the)\b|"
    r"(?:right|correct|accurate|good|better|fair)\b)"
)
_SENTENCE = re.compile(r"[.!?;\n]+")
_TELLER = re.compile(r"\b(?:i|i'm|i've|i'd|im|ive|my|me|we|we've|our|someone|somebody|you|your)\b")
# What asks for something, so that a time behind it is the time asked about.
_ASKS = re.compile(
    r"\b(?:what|what's|whats|which|who|who's|whose|where|where's|how(?! come\b)|"
    r"when(?:'s| is| are| was| were| will| do| does| did| can)|"
    r"tell|show|give|let me|hear|state|share|list|find|check|look|search|bring|read|play|text|send|book|schedule|set|"
    r"remind|want|wants|need|needs|like|wish|wonder|wondering|know|hope|see if|plan|planning)\b"
    r"|^[^\w]*(?:please |hey |hi |hello |ok |so |and |but )?"
    r"(?:am|is|are|was|were|do|does|did|can|could|will|would|should|has|have|had|may|any|add|get|make|call|put)\b"
)
# Questions that go with an account of what happened, and have nothing to do with when it did.
_PLAIN_QUESTION = re.compile(
    r"\bwhat(?:'s| is| has|s)? (?:wrong|going on|happening|happened|the (?:issue|problem|matter|reason|deal|cause)|"
    r"up\b)|"
    r"\bwhat (?:do|should|can|must|could|would|shall) (?:i|we|you) (?:do|try|need)|\bwhat (?:now|happens|to do)|"
    r"\bhow (?:do|can|could|should|would|to|does|did|come)|\bwhere (?:do|can|should|could) i|\bwhat i |\bwhat it |"
    r"\b(?:not|n't|never) (?:know|see|find|understand|sure) (?:what|where|how|who|which|when)"
)
_SEEKS = re.compile(
    r"\b(?:what|what's|whats|which|who|who's|whose|where|where's|how|"
    r"when(?:'s| is| are| was| were| will| do| does| did| can))\b"
)
_NOW_CHINESE = re.compile(
    r"今天|明天|昨天|后天|今晚|今早|现在|目前|当前|最新|最近|近期|刚才|刚刚|[这本上下](?:周|个?星期|个?月|季度)|今年|去年|明年|"
    r"几点了|几号了|天气|新闻|股价|汇率|金价|油价|比分"
)

# Of what belongs to the asker: what only the asker's records hold, and what one also asks about in general.
_RECORDS = re.compile(
    r"\b(?:who am i|where am i|where do i live|how old am i|about me|remember me|do you remember|"
    r"my (?:\w+ )?(?:orders?|invoice|bookings?|reservations?|appointments?|calendar|"
    r"location|coordinates|diagnosis|prescriptions?|ssn|routing number)|"
    r"(?:do|did) i have any (?:\w+ ){0,2}(?:meetings?|events?|reminders?|appointments?|plans|messages?|e?mails?|money|"
    r"points|days|payments?|bills?)|(?:how much|what) (?:\w+ ){0,4}do i (?:owe|earn|make)(?! for\b)|"
    r"how much (?:\w+ ){0,4}(?:did i (?:spend|earn|make)|have i (?:spent|earned|made)|do i have (?:in|on|left))|"
    r"(?:show|retrieve|list|bring up|pull up|give me|get me|read me) (?:\w+ ){0,3}my (?:\w+ ){0,2}"
    r"(?:transactions?|transaction history|purchases)|"
    r"(?:find|locate|locating|ring|where(?:'s| is| was| did i)) (?:\w+ ){0,5}my (?:\w+ )?phone)\b"
    r"|(?<![\d.])\+?\d(?:[ -]?\d){8,}(?![\d.])"  # a telephone, card or account number
)
_DATA = re.compile(
    r"\bmy (?:\w+ ){0,2}(?:name|age|birthday|email|e-mail|address|phone no|number|password|passcode|pin code|"
    r"balance|salary|paycheck|income|bill|credit (?:limit|score|rating)|spending)\b|"
    r"\b(?:the|this) (?:current )?account balance\b"
)
_E_MAIL = re.compile(r"[\w.+-]@[\w-]+\.\w")
# What wants to be told the value of it.
_WANTS_VALUE = re.compile(
    r"\b(?:what|what's|whats|which|who|whose|tell|show|give|say|read|check|see|know|view|look|find|get|display|have|"
    r"how (?:much|many|old|high|low|is|are|was)|when|where|remember|remind|list|recite|repeat|report|verify|confirm|"
    r"retrieve|access|inform|bring up|pull up|is|are|was|were|do you|did you|does)\b"
)
# How something is done, and why, is the same for everybody.
_IN_GENERAL = re.compile(
    r"\bhow (?:do|can|could|would|should|might|must|to|does|did|come)\b|\bwhy\b|"
    r"\bwhat (?:should|do|can|must|could|would) i do\b|\bwhat (?:happens|if)\b|"
    r"\b(?:where|when) (?:do|can|could|should|must) i\b|"
    r"\b(?:to|i|i'd|we|and|or|can't|cannot|please) (?:\w+ly )?"
    r"(?:change|reset|update|edit|modify|correct|recover|unblock|unlock|forgot|forget|lost|lose|add|receive|deposit|"
    r"replace|set|register|enter|use|choose|protect|remember|moved?|improve|raise|increase|build|repair|dispute|pay)"
    r"(?: to| for| on)? my\b|"
    r"\b(?:not|n't) (?:remember|recall|know|in|on|showing|added|reflected|updated?)\b"
)
_PERSONAL_CHINESE = re.compile(
    r"我(?:的|家)?(?:名字|年龄|生日|邮箱|地址|电话|手机号|密码|余额|工资|订单|发票|预约|预订|日程|位置|病历|身份证)|我是谁|我在哪|我多大|我几岁|记得我"
)
_APOSTROPHES = str.maketrans({"’": "'", "‘": "'"})


def on_time(text: str) -> bool:
    """Whether the answer depends on when it is asked: the weather, the latest version, what is on today."""
    lower = text.lower().translate(_APOSTROPHES)
    if _NOW.search(lower):
        return True
    lower = _IDIOM.sub(" ", lower)
    if _WHEN.search(lower) and not _tells_when(lower):
        return True
    if _RATE.search(lower) and not all(
        _NO_RATE_ASKED.search(sentence) for sentence in _SENTENCE.split(lower) if _RATE.search(sentence)
    ):
        return True
    return is_chinese(text) and bool(_NOW_CHINESE.search(text))


def on_asker(text: str) -> bool:
    """Whether the answer depends on who asks, or the question holds an e-mail address or a long number."""
    lower = text.lower().translate(_APOSTROPHES)
    if _RECORDS.search(lower) or ("@" in lower and _E_MAIL.search(lower)):
        return True
    if _DATA.search(lower) and any(map(_asks_for_data, _SENTENCE.split(lower))):
        return True
    return is_chinese(text) and bool(_PERSONAL_CHINESE.search(text))


def _tells_when(lower: str) -> bool:
    """Whether every time that is named is one of an account of the asker's, and no question goes beyond that."""
    for sentence in _SENTENCE.split(lower):
        times = [match.start() for match in _WHEN.finditer(sentence)]
        if not times:
            continue
        # A time at the very beginning belongs to all of the sentence, another to what stands before it.
        until = len(sentence) if times[0] < 3 else times[-1]
        if not _TELLER.search(sentence) or _ASKS.search(sentence, 0, until):
            return False
    spans = [(match.start(), match.end()) for match in _PLAIN_QUESTION.finditer(lower)]
    at = 0
    for match in _SEEKS.finditer(lower):
        while at < len(spans) and spans[at][1] <= match.start():
            at += 1
        if at == len(spans) or not spans[at][0] <= match.start() < spans[at][1]:
            return False
    return True


def _asks_for_data(sentence: str) -> bool:
    found = _DATA.search(sentence)
    if found is None or _IN_GENERAL.search(sentence):
        return False
    return bool(_WANTS_VALUE.search(sentence))
