"""Whether a text declines to do what was asked: a few sentences of apology and no answer.

A wrong "yes" costs a request to a larger model and a good answer thrown away, a wrong "no" only what would have
happened without the check. So it is careful: short texts only, a phrase by which a model speaks of itself as unable or
unwilling, at the very beginning, and nothing where the text goes on to help. The labelled examples in
`tests/gateway/test_refusals.py` say how often it is right.
"""

from __future__ import annotations

import re
from typing import Final

MOST_CHARACTERS: Final = 600  # a refusal is short; a long answer that begins with an apology usually answers
_BEGINNING: Final = 200

# What the model says it cannot do: to help, to answer, to write such a thing. Not "I can't find the file" or "I cannot
# recommend it enough", which are answers.
_DEEDS_EN: Final = (
    r"(?:help|assist|support|comply|fulfil+|do|answer|respond|provide|give|generate|create|write|produce|continue|engage|"
    r"participate|discuss|share|offer|complete|process|carry out|proceed|translate|summari[sz]e|perform)"
)
_ABLE_EN: Final = (
    r"(?:i\s*(?:['’]m|\s+am)\s+(?:not\s+able|unable|not\s+allowed|not\s+permitted|not\s+comfortable)\s+(?:to\s+)?)"
)
_CANNOT_EN: Final = (
    r"(?:i\s+(?:can(?:not|['’]?t|\s+not)|(?:won['’]?t|will\s+not)(?:\s+be\s+able)?|(?:must\s+|have\s+to\s+)?decline)\s+"
    r"(?:to\s+)?)"
)
_SORRY_EN: Final = (
    r"(?:(?:i['’]?m|i\s+am)\s+(?:so\s+|very\s+|really\s+)?sorry|sorry|i['’]?m\s+afraid|i\s+apologi[sz]e|my\s+apologies|apologies|unfortunately|"
    r"regrettably)"
)
_AS_AI_EN: Final = r"as\s+an?\s+(?:ai|artificial\s+intelligence|(?:large\s+)?language\s+model)\b[^.!?\n]{0,60}?"

_PATTERNS: Final = (
    rf"(?:{_SORRY_EN}[,.!]?\s+(?:but\s+|that\s+)?(?:{_AS_AI_EN},?\s+)?)?"
    rf"(?:{_CANNOT_EN}|{_ABLE_EN})(?:[a-z]+ly\s+)?(?:to\s+)?{_DEEDS_EN}\b"
    r"(?!\s+(?:you\s+)?(?:an?\s+|the\s+)?(?:exact|precise|definit|single|complete|full|more\b|better\b))",
    rf"{_AS_AI_EN},?\s*(?:{_CANNOT_EN}|{_ABLE_EN}|i\s+(?:do\s+not|don['’]?t)\s+have\s+(?:access|the\s+ability|personal|the\s+capability))",
    rf"{_SORRY_EN}[,.!]?\s+(?:but\s+)?(?:(?:that|this)(?:['’]?s|\s+is)\s+(?:not\s+something\s+i|beyond\s+what\s+i)|i\s+don['’]?t\s+feel\s+comfortable)",
    r"i(?:\s+(?:do\s+not|don['’]?t)\s+feel|(?:['’]m|\s+am)\s+not)\s+comfortable\s+(?:with\s+)?\w+ing\b",
    r"i\s+must\s+(?:respectfully\s+)?(?:refuse|decline)\b",
    # Chinese: 抱歉/对不起 ... 无法/不能 + 提供/帮助/回答..., and 作为AI
    r"(?:(?:非常|很|十分|真的)?(?:抱歉|对不起|對不起|不好意思)[^。！？\n]{0,24}?)?(?:我|本人|作为[^，,。\n]{0,12}[，,]\s*我?)"
    r"(?:目前|暂时|實在|实在|也)?(?:无法|無法|不能|没有办法|沒有辦法|没办法|不可以|不便|拒绝|拒絕)(?:为您|为你|为您|帮您|帮你|幫您|幫你|向您|向你|给您|给你|對此|对此|就此|继续|直接)?"
    r"(?:提供|帮助|幫助|协助|協助|回答|回應|回应|满足|滿足|完成|生成|讨论|討論|编写|編寫|撰写|撰寫|执行|執行|参与|處理|处理|这样做|這樣做)",
    r"(?:抱歉|对不起|對不起)[，,。]?\s*(?:无法|無法|不能)(?:提供|回答|协助|協助|帮助|幫助|完成|满足|滿足|處理|处理)",
    # Spanish, Portuguese
    r"(?:lo\s+siento|perd[oó]n|disculpa|lamentablemente|lamento)[,.]?\s+(?:mucho,?\s+)?(?:pero\s+)?no\s+(?:puedo|podr[ée]|me\s+es\s+posible)\s+"
    r"(?:ayudar|asistir|responder|proporcionar|generar|crear|escribir|hacer|cumplir|continuar|ofrecer|dar)",
    r"no\s+puedo\s+(?:ayudarte|ayudarle|ayudar\s+con|proporcionar|cumplir\s+con|asistirte|asistirle|responder\s+a\s+es[ao]|participar\s+en)",
    r"(?:desculpe|desculpa|sinto\s+muito|lamento|infelizmente)[,.]?\s+(?:mas\s+)?(?:eu\s+)?n[ãa]o\s+(?:posso|consigo)\s+"
    r"(?:ajudar|fornecer|responder|gerar|criar|escrever|fazer|cumprir|continuar|atender)",
    # French
    r"(?:(?:je\s+suis\s+)?d[ée]sol[ée]e?|je\s+regrette|malheureusement)[,.]?\s+(?:mais\s+)?je\s+ne\s+(?:peux|suis)\s+"
    r"(?:pas|(?:pas\s+)?en\s+mesure\s+d['e])",
    r"je\s+ne\s+peux\s+pas\s+(?:vous\s+aider|t['’]aider|r[ée]pondre\s+[àa]\s+cette|fournir|g[ée]n[ée]rer|accéder\s+[àa]\s+cette|participer)",
    # German
    r"(?:(?:es\s+)?tut\s+mir\s+(?:sehr\s+)?leid|entschuldigung|leider|bedaure)[,.]?\s+(?:aber\s+)?(?:dabei\s+|damit\s+|das\s+)?kann\s+ich\b[^.!?\n]{0,40}?\bnicht\b",
    r"ich\s+kann\s+(?:(?:ihnen|dir|euch)\s+)?(?:dabei|damit|bei\s+dieser\s+anfrage|diese\s+(?:anfrage|frage)|dieser\s+bitte)\s+(?:leider\s+)?nicht\b",
    r"(?:es\s+)?tut\s+mir\s+leid[,.]?\s+(?:aber\s+)?ich\s+kann\b[^.!?\n]{0,60}?\bnicht\s+(?:helfen|behilflich|unterst[üu]tzen|beantworten|erf[üu]llen|weiterhelfen|erstellen|geben)",
    # Japanese, Korean, Russian, Italian
    r"(?:申し訳(?:ございません|ありません|ない)|すみません|ごめんなさい)[^\n]{0,60}?(?:お答え|お手伝い|提供|対応|回答|お応え|支援)(?:する|を?する)?(?:こと)?(?:は|が)?(?:できません|できかねます|いたしかねます|致しかねます)",
    r"(?:죄송(?:합니다|하지만)|미안(?:합니다|하지만))[^\n]{0,60}?(?:도와\s?드릴|답변(?:해\s?드릴|할)?|제공(?:해\s?드릴|할)?|도움을\s?드릴)\s?수\s?(?:가\s?)?없",
    r"(?:извините|к\s+сожалению|простите|прошу\s+прощения)[,.]?\s+(?:но\s+)?(?:как\s+[^,.\n]{0,40},\s+)?я\s+не\s+(?:могу|смогу)\s+"
    r"(?:помочь|вам\s+помочь|ответить|предоставить|выполнить|создать|написать|обсуждать|с\s+этим\s+помочь)",
    r"(?:mi\s+dispiace|spiacente|purtroppo)[,.]?\s+(?:ma\s+)?non\s+(?:posso|sono\s+in\s+grado\s+di)\s+"
    r"(?:aiutar|fornire|rispondere|generare|creare|scrivere|soddisfare|continuare|assister)",
)  # fmt: skip
_REFUSES: Final = re.compile(r"\W*(?:" + "|".join(f"(?:{pattern})" for pattern in _PATTERNS) + ")", re.IGNORECASE)
# After which the text helps after all.
_HELPS: Final = re.compile(
    r"\b(?:here(?:['’]s|\s+is|\s+are)|instead,?\s+here|the\s+answer\s+is|for\s+example\s*:|"
    r"i\s+can\s+(?:tell|say|confirm)\s+(?:you\s+)?that)\b|```|\n\s*(?:[-*•]|\d+[.)])\s+\S",
    re.IGNORECASE,
)


def refuses(text: str) -> bool:
    """Whether the text is a refusal."""
    text = text.strip()
    if not text or len(text) > MOST_CHARACTERS:
        return False
    found = _REFUSES.match(text[:_BEGINNING])
    return found is not None and _HELPS.search(text, found.end()) is None
