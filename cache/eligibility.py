"""Which requests the cache may answer, and which answers it may keep.

`check` says how much of the cache a request may use: `off`, `exact` (the same words only) or `semantic`; and, where
that is less than the policy asked for, why, as a stable word. `storable` says why an answer may not be kept.
In doubt a request is refused: a miss costs money, a wrong hit costs trust.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from cache.key import last_user_text
from cache.words.chinese import is_chinese
from cache.words.text import looks_english, main_script, scripts, words

Mode = Literal["off", "exact", "semantic"]

# Longer texts carry details that one vector blurs; the exact cache still serves them.
MAX_SEMANTIC_CHARACTERS = 600
# The front door looks through every question itself, and others wait meanwhile: some 30 ms for one of this length.
MAX_CHARACTERS = 65_536
ENGLISH_ALPHABET = frozenset({"latin"})

# The next three are searched for in lower case, which is several times faster than ignoring case; they must stay linear
# in the length of the text, whatever it is.
_TIME_BOUND = re.compile(
    r"\b(?:today|tonight|tomorrow|yesterday|now|nowadays|currently|latest|newest|recent|recently|lately|upcoming|"
    r"(?<!electric )(?<!alternating )(?<!direct )(?<!ocean )current|"
    r"(?:this|last|next|past) (?:second|minute|hour|morning|afternoon|evening|night|day|week|weekend|month|"
    r"quarter|year|season|monday|tuesday|wednesday|thursday|friday|saturday|sunday)|"
    r"at the moment|at present|these days|so far|as of|up to date|up-to-date|breaking news|the news|headlines|weather|"
    r"(?:what|which) (?:time|day|date|year|month) is|what's the (?:time|date)|what is the (?:time|date|day)|"
    r"stock price|share price|exchange rate|price of (?:bitcoin|gold|oil)|score of|how long ago|"
    r"\d+ (?:minutes|hours|days|weeks|months|years) ago|aujourd'hui|heute|hoy|oggi|hoje|vandaag)\b"
)
_TIME_BOUND_CHINESE = re.compile(
    r"今天|明天|昨天|后天|今晚|今早|现在|目前|当前|最新|最近|近期|刚才|刚刚|[这本上下](?:周|个?星期|个?月|季度)|今年|去年|明年|"
    r"几点了|几号了|天气|新闻|股价|汇率|金价|油价|比分"
)
_PERSONAL_CHINESE = re.compile(
    r"我(?:的|家)?(?:名字|年龄|生日|邮箱|地址|电话|手机号|密码|余额|工资|订单|发票|预约|预订|日程|位置|病历|身份证)|我是谁|我在哪|我多大|我几岁|记得我"
)
_PERSONAL = re.compile(
    r"\b(?:who am i|where am i|where do i live|how old am i|about me|remember me|do you remember|"
    r"my (?:\w+ )?(?:name|age|birthday|email|e-mail|address|phone|number|password|passcode|pin code|account balance|"
    r"balance|salary|order|invoice|booking|reservation|appointment|calendar|location|diagnosis|prescription|ssn))\b"
    r"|(?<![\d.])\+?\d(?:[ -]?\d){8,}(?![\d.])"  # a telephone, card or account number
)
_E_MAIL = re.compile(r"[\w.+-]@[\w-]+\.\w")
# The answer copies or transforms the very words of the request: a rewording is another task.
_WORDING_BOUND = re.compile(
    r"\b(?:translat\w*|rewrit\w*|re-writ\w*|rephras\w*|reword\w*|paraphras\w*|proofread\w*|spell-?check\w*|summari[sz]\w*|"
    r"shorten|abbreviat\w*|transcrib\w*|transliterat\w*|anagram\w*|palindrom\w*|rhym\w*|"
    r"(?:correct|fix|check|improve) (?:the |my |this |these )?(?:\w+ )?(?:grammar|spelling|punctuation|sentence|"
    r"sentences|text|paragraph|typos?|errors?|mistakes?)|"
    r"(?:repeat|echo|quote|classify|categori[sz]e|label|extract|tag|format|convert|complete|continue|count) "
    r"(?:the|this|these|after|from|back|following|my|in|how)|"
    r"how many (?:letters|words|characters|vowels|syllables|times)|the following|as follows|verbatim|word for word|"
    r"capitali[sz]\w*|(?:upper|lower|title|camel|snake)[ -]?case\w*|(?:capital|block|small) letters?|all caps|"
    r"case[ -](?:in)?sensitiv\w*|regex\w*|regular expressions?|spell(?:ed|ing|s|t)?|punctuat\w*|"
    r"(?:question|exclamation) marks?|full stops?)\b",
    re.IGNORECASE,
)
_WORDING_BOUND_CHINESE = re.compile(
    r"翻译|译成|改写|改成|润色|总结|概括|缩写|校对|纠正|复述|重复|多少[个]?字|几个字|笔画|拼音|怎么读|怎么写|大写|小写|押韵|造句|以下|下面|下列|如下"
)
_QUOTED = re.compile(
    r"[「」『』]|[\"“”«»][^\"“”«»]{2,}[\"“”«»]|(?<![\w'])'[^'\n]{2,}'(?!\w)|:\s*\S+(?:\s+\S+){4,}|:\s*\n"
)
_CODE = re.compile(
    r"```|`[^`]+`|^\s*(?:def|class|import|from|function|const|let|var|SELECT|#include)\b.*[({;:*]|[{};]\s*$|\w\(\w*\)",
    re.M,
)
_ANAPHORA = re.compile(
    r"\b(?:it|its|itself|that|this|these|those|they|them|their|theirs|he|him|his|she|her|hers|ones?|same|former|latter|"
    r"above|previous|previously|earlier|last|first|second|third|fourth|others?|another|else|instead|again|too|also|more|"
    r"there|here|so|such|both|neither|either|then|continue|further)\b"
)
_FOLLOW_UP_OPENING = re.compile(
    r"(?:and|but|or|also|so|then|because|why|yes|no|yeah|nope|ok|okay|sure|right|thanks|please|go|continue|what about|"
    r"how about|how so|how come|what if|in that|same|are you sure|really)\b"
)
_ATTACHMENTS = {"image_url": "images", "input_image": "images", "image": "images"}


class Eligibility(msgspec.Struct, frozen=True):
    """How much of the cache a request may use; `reason` is None when that is all the policy asked for."""

    mode: Mode
    reason: str | None = None


def check(
    payload: dict[str, Any],
    *,
    mode: Mode,
    allow_temperature: float,
    default_temperature: float | None = None,
    scripts_covered: frozenset[str] = ENGLISH_ALPHABET,
) -> Eligibility:
    """Decide how a chat request may use the cache.

    Args:
        payload: the decoded JSON body, already validated.
        mode: the most that the policy allows.
        allow_temperature: the highest temperature at which an answer may be given again.
        default_temperature: what counts where the request names none; None if nobody knows. A request that leaves it
            to a server whose default nobody knows has not asked for variety and is allowed.
        scripts_covered: scripts that the embedder knows (`CacheClient.scripts`).

    Reasons for `off`: policy, tools, n, logprobs, temperature, web_search, audio, images, attachments, not_a_question,
    empty, too_long, time_bound, personal. Reasons for `exact` where `semantic` was asked: structured_output,
    prediction, several_parts, too_long, code, depends_on_wording, script_not_covered, language_not_covered,
    not_standalone.
    """
    if mode == "off":
        return Eligibility("off", "policy")
    never = _never(payload, allow_temperature, default_temperature)
    if never or mode == "exact":
        return Eligibility("off", never) if never else Eligibility("exact")
    only_exact = _only_exact(payload, scripts_covered)
    return Eligibility("exact", only_exact) if only_exact else Eligibility("semantic")


def storable(answer: dict[str, Any]) -> str | None:
    """Why an answer may not be kept: error, choices, finish_reason, tool_calls, refusal, audio, empty; None if it may.

    Args:
        answer: a decoded `chat.completion` object.
    """
    choices = answer.get("choices")
    if answer.get("error"):
        return "error"
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return "choices"
    message = choices[0].get("message")
    if choices[0].get("finish_reason") != "stop":
        return "finish_reason"
    if not isinstance(message, dict):
        return "empty"
    if message.get("tool_calls") or message.get("function_call"):
        return "tool_calls"
    if message.get("refusal"):
        return "refusal"
    if message.get("audio"):
        return "audio"
    content = message.get("content")
    return None if isinstance(content, str) and content.strip() else "empty"


def _never(payload: dict[str, Any], allow_temperature: float, default_temperature: float | None) -> str | None:
    """Why not even the same words may get the same answer."""
    if payload.get("tools") or payload.get("functions"):
        return "tools"
    if (payload.get("n") or 1) != 1:
        return "n"
    if payload.get("logprobs") or payload.get("top_logprobs"):
        return "logprobs"
    temperature = default_temperature if payload.get("temperature") is None else payload["temperature"]
    if temperature is not None and temperature > allow_temperature:
        return "temperature"
    if payload.get("web_search_options") is not None:
        return "web_search"
    if payload.get("audio") or "audio" in (payload.get("modalities") or ()):
        return "audio"
    messages = payload.get("messages") or []
    attachment = _attachment(messages)
    if attachment:
        return attachment
    text = last_user_text(messages)
    if text is None:
        return "not_a_question"
    if not text.strip():
        return "empty"
    if len(text) > MAX_CHARACTERS:
        return "too_long"
    lower = text.lower()
    chinese = is_chinese(text)
    if _TIME_BOUND.search(lower) or (chinese and _TIME_BOUND_CHINESE.search(text)):
        return "time_bound"
    if _PERSONAL.search(lower) or ("@" in lower and _E_MAIL.search(lower)):
        return "personal"
    return "personal" if chinese and _PERSONAL_CHINESE.search(text) else None


def _only_exact(payload: dict[str, Any], covered: frozenset[str]) -> str | None:
    """Why other words may not get the same answer."""
    if (payload.get("response_format") or {}).get("type", "text") != "text":
        return "structured_output"
    if payload.get("prediction"):
        return "prediction"
    content = payload["messages"][-1].get("content")
    if isinstance(content, list) and len(content) > 1:
        return "several_parts"  # where one part ends and the next begins is nothing that a vector or a guard sees
    text = last_user_text(payload["messages"]) or ""
    if len(text) > MAX_SEMANTIC_CHARACTERS:
        return "too_long"
    if _CODE.search(text):
        return "code"
    if _WORDING_BOUND.search(text) or _QUOTED.search(text) or _WORDING_BOUND_CHINESE.search(text):
        return "depends_on_wording"
    if not scripts(text) <= covered:
        return "script_not_covered"
    if not (is_chinese(text) or (main_script(text) in ("latin", "none") and looks_english(text))):
        return "language_not_covered"
    earlier = any(message.get("role") in ("user", "assistant", "tool") for message in payload["messages"][:-1])
    return "not_standalone" if earlier and not stands_alone(text) else None


def stands_alone(text: str) -> bool:
    """Whether a follow-up can be understood without the turns before it: no pronoun, no ellipsis."""
    sentence = " ".join(words(text))
    if sentence.count(" ") < 3 or _ANAPHORA.search(sentence):
        return False
    return not _FOLLOW_UP_OPENING.match(sentence)


def _attachment(messages: list[Any]) -> str | None:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in ("text", "refusal"):
                return "audio" if kind == "input_audio" else _ATTACHMENTS.get(str(kind), "attachments")
    return None
