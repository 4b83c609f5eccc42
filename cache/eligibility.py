"""Which requests the cache may answer, and which answers it may keep.

`check` says how much of the cache a request may use: `off`, `exact` (the same words only) or `semantic`; and, where
that is less than the policy asked for, why, as a stable word. `storable` says why an answer may not be kept.
In doubt a request is refused: a miss costs money, a wrong hit costs trust.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Literal

import msgspec

from cache.key import last_user_text
from cache.words.chinese import is_chinese
from cache.words.dependence import on_asker, on_time
from cache.words.text import looks_english, main_script, scripts, words

Mode = Literal["off", "exact", "semantic"]
# Reasons for no cache at all that a policy may set aside, because its owner knows that they do not hold there.
Allowable = Literal["personal", "time_bound"]

# Longer texts carry details that one vector blurs; the exact cache still serves them.
MAX_SEMANTIC_CHARACTERS = 600
# The front door looks through every question itself, and others wait meanwhile: some 30 ms for one of this length.
MAX_CHARACTERS = 65_536
ENGLISH_ALPHABET = frozenset({"latin"})

# The answer copies or transforms the very words of the request: a rewording is another task.
_WORDING_BOUND = re.compile(
    r"\b(?:translat\w*|rewrit\w*|re-writ\w*|rephras\w*|reword\w*|paraphras\w*|proofread\w*|spell-?check\w*|summari[sz]\w*|"
    r"shorten|abbreviat\w*|transcrib\w*|transliterat\w*|anagram\w*|palindrom\w*|rhym\w*|"
    r"(?:correct|fix|check|improve) (?:the |my |this |these )?(?:\w+ )?(?:grammar|spelling|punctuation|sentence|"
    r"sentences|text|paragraph|typos?|errors?|mistakes?)|"
    r"(?!complete my)(?:repeat|echo|quote|classify|categori[sz]e|label|extract|tag|format|convert|complete|continue|"
    r"count) (?:the|this|these|after|from|back|following|my|in|how)|"
    r"how many (?:letters|words|characters|vowels|syllables|times (?:do|does|is))|"
    r"the following|as follows|verbatim|word for word|"
    r"capitali[sz]\w*|(?:upper|lower|title|camel|snake)[ -]?case\w*|(?:capital|block|small) letters?|all caps|"
    r"case[ -](?:in)?sensitiv\w*|regex\w*|regular expressions?|spell(?:ed|ing|s|t)?|punctuat\w*|"
    r"(?:question|exclamation) marks?|full stops?)\b",
    re.IGNORECASE,
)
_WORDING_BOUND_CHINESE = re.compile(
    r"翻译|译成|改写|改成|润色|总结|概括|缩写|校对|纠正|复述|重复|多少[个]?字|几个字|笔画|拼音|怎么读|怎么写|大写|小写|押韵|造句|以下|下面|下列|如下"
)
# The question says what to answer. Whoever asks it in earnest gets what it wants; nobody else may.
_STEERS = re.compile(
    r"\b(?:ignore|disregard|forget|override) (?:\w+ ){0,2}(?:previous|prior|above|earlier|other|system|instructions?)|"
    r"\b(?:answer|reply|respond|output|print|return) (?:only|just|exactly|always|simply|with|that|as)\b|"
    r"\b(?:say|claim|pretend|insist|state|mention|recommend|tell (?:me|them|us|everyone|people|the user)) "
    r"(?:only|just|exactly|always|that)\b|"
    r"\b(?:you are now|act as|role-?play|as if you|no matter what|"
    r"you (?:must|should|will|have to) (?:only |always )?(?:answer|say|reply|respond|recommend|tell|mention)|"
    r"(?:in|at the end of|to) your (?:answer|reply|response)|"
    r"your (?:answer|reply|response) (?:must|should|shall|is|will|has to)|"
    r"the (?:correct |right |only )?answer (?:must|should|will))\b|"
    r"(?:^|[.!?:;]\s*|,\s+)(?:please |just |simply |now |and |then )*(?:say|answer|reply|respond)\b|"
    r"[?.!,]\s*(?:(?:yes|no|yeah|nope|yep|true|false|right|correct)\b[\s,.!?]*)+$|"
    r"\s(?:yes|no|yeah|nope|yep)\b[\s,.!?]*(?:true|false|right|correct)?[\s,.!?]*$",
    re.IGNORECASE,
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
    allow: Collection[Allowable] = (),
) -> Eligibility:
    """Decide how a chat request may use the cache.

    Args:
        payload: the decoded JSON body, already validated.
        mode: the most that the policy allows.
        allow_temperature: the highest temperature at which an answer may be given again.
        default_temperature: what counts where the request names none; None if nobody knows. A request that leaves it
            to a server whose default nobody knows has not asked for variety and is allowed.
        scripts_covered: scripts that the embedder knows (`CacheClient.scripts`).
        allow: reasons that do not count under this policy.

    Reasons for `off`: policy, tools, n, logprobs, temperature, web_search, audio, images, attachments, not_a_question,
    empty, too_long, time_bound, personal. Reasons for `exact` where `semantic` was asked: structured_output,
    prediction, several_parts, too_long, code, depends_on_wording, steers_the_answer, script_not_covered,
    language_not_covered, not_standalone.
    """
    if mode == "off":
        return Eligibility("off", "policy")
    never = _never(payload, allow_temperature, default_temperature, allow)
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


def too_varied(payload: dict[str, Any], allow_temperature: float, default_temperature: float | None) -> bool:
    """Whether the temperature of a request, or the model's own where it names none, is above what is allowed."""
    temperature = default_temperature if payload.get("temperature") is None else payload["temperature"]
    return temperature is not None and temperature > allow_temperature


def _never(
    payload: dict[str, Any], allow_temperature: float, default_temperature: float | None, allow: Collection[Allowable]
) -> str | None:
    """Why not even the same words may get the same answer."""
    if payload.get("tools") or payload.get("functions"):
        return "tools"
    if (payload.get("n") or 1) != 1:
        return "n"
    if payload.get("logprobs") or payload.get("top_logprobs") or payload.get("prompt_logprobs") is not None:
        return "logprobs"
    if too_varied(payload, allow_temperature, default_temperature):
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
    if "time_bound" not in allow and on_time(text):
        return "time_bound"
    return "personal" if "personal" not in allow and on_asker(text) else None


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
    if _STEERS.search(text):
        return "steers_the_answer"
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
