"""Guards for Chinese: what differs between two texts that share most of their characters.

Written without spaces, Chinese has no words to compare, so characters are: those that only one text holds, and the
order of those that both hold. Like the English guards, each finds one class of difference; `guards.objection` asks
these where a text holds Chinese characters, and the English ones about the rest of it. Traditional characters are read
as simplified ones, as far as the lists below need it.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import lru_cache
from itertools import combinations, pairwise

import msgspec

from cache.words.quantifiers import chinese_quantifiers, conflict


def _list(listing: str) -> list[str]:
    return listing.split()


_HAN = re.compile(r"[\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_KANA = re.compile(r"[\u3041-\u30ff]")
_SIMPLIFIED = str.maketrans(
    "開關進從後時內來無沒過於東遠長舊壞熱買賣還發減輸贏勝負遲緊鬆輕寬貴賤異間個們誰麼裡裏嗎還會應該請問與離陸"
    "載導裝釋勞強繁簡輸劣優錯對實虛滿",
    "开关进从后时内来无没过于东远长旧坏热买卖还发减输赢胜负迟紧松轻宽贵贱异间个们谁么里里吗还会应该请问与离陆"
    "载导装释劳强繁简输劣优错对实虚满",
)
_FRAME = re.compile(
    r"^(?:(?:你好|您好|请问|请|麻烦|劳驾|我想知道|我想问|想问一下|想问|能不能|可以|能)*(?:告诉我|帮我|说说|解释)?(?:一下)?)(?=.{2})|"
    r"谢谢[你您]?$"
)
# Each pair of characters says the opposite where one text holds the first and the other, in its place, the second.
_OPPOSITES = frozenset(
    frozenset(pair)
    for pair in _list("""
    开关 开闭 进出 入出 入取 存取 来去 往来 上下 前后 内外 里外 大小 高低 高矮 长短
    多少 左右 东西 南北 快慢 早晚 迟早 新旧 好坏 好差 冷热 冷暖 买卖 借还 收发 加减
    增减 升降 输赢 胜负 胜败 生死 男女 正负 优劣 强弱 轻重 宽窄 厚薄 深浅 贵贱 松紧
    真假 对错 远近 胖瘦 粗细 干湿 明暗 黑白 难易 公私 攻守 得失 始终 首末 首尾 先后
    昼夜 日夜 父母 爸妈 儿女 夫妻 兄弟 哥弟 姐妹 爱恨 笑哭 推拉 装卸 锁解 加删 增删
    留删 问答 教学 奖罚 盈亏 满空 甜苦 软硬 虚实 繁简 有无
    """)
)
_OPPOSITE_WORDS = [
    pair.split("/")
    for pair in _list("""
    登录/登出 登录/注销 登陆/登出 允许/禁止 允许/拒绝 接受/拒绝 同意/拒绝 同意/反对 支持/反对 批准/拒绝
    启用/禁用 激活/停用 激活/取消 订阅/取消 订阅/退订 加入/退出 连接/断开 加密/解密 压缩/解压 创建/删除
    添加/删除 添加/移除 增加/删除 显示/隐藏 成功/失败 通过/失败 安全/危险 增加/减少 提高/降低 上升/下跌
    便宜/昂贵 简单/困难 容易/困难 优点/缺点 优势/劣势 好处/坏处 利/弊 开始/结束 出发/到达 起飞/降落
    白天/晚上 今天/明天 今天/昨天 公开/私密 主要/次要 租客/房东 买家/卖家 合法/非法 包括/除外 手动/自动
    主动/被动 赚钱/亏钱 便宜/贵 申请/取消 申请/撤销 预订/取消 预约/取消 打开/关闭 上午/下午 上午/晚上 早上/晚上
    雇主/雇员 恢复/暂停 冻结/解冻 开通/注销
    """)
]
_RELATIONS = {
    "source": r"从(?![事来不])|来自|寄自|源自|出自|离开|发自",
    "goal": r"(?<![收找看得遇达做买提感受想直])到(?!底|达|处)|前往|[寄发开飞送]往|(?<![一方意偏导倾])向(?!来|上|下)|去",
    "before": r"之前|以前|(?<![目当提])前(?![面台任往提])",
    "after": r"之后|以后|(?<![最然售落])后(?![面台果悔])",
    "during": r"期间|时候|(?<![小临及同有准随])时(?!间|候|差|代|尚)|过程中|随(?![便时后机])",
    "above": r"以上|(?<!不)超过|(?<!不)[高多大]于",
    "below": r"以下|以内|(?<!不)[低少小]于|不足|不到",
    "at least": r"至少|最少|起码|不少于|不低于|不小于",
    "at most": r"至多|最多|不超过|不高于|不多于|不大于",
}
_KINDS = {kind: re.compile(pattern) for kind, pattern in _RELATIONS.items()}
_EXCLUDE = [
    {"source", "goal"},
    *map(set, combinations(("before", "after", "during"), 2)),
    *map(set, combinations(("above", "below", "at least", "at most"), 2)),
]
_ASKED_FOR = [
    ("why", r"为什么|为何|为啥|怎么会"),
    ("when", r"什么时候|何时|几点|哪天|哪年|几号"),
    ("how long", r"多久|多长时间"),
    ("where", r"哪里|哪儿|何处|什么地方"),
    ("how many", r"多少|几(?=[^乎点号何])"),
    ("who", r"谁|什么人"),
    ("how", r"怎么|如何|怎样|怎么样"),
]
_MUST, _MAY = re.compile(r"必须|一定要|非得|务必|需要|应该|应当"), re.compile(r"可以|可否|能否|能不能|允许|是否能")
_UNITS = re.compile(
    r"美元|欧元|日元|英镑|人民币|港[币元]|韩元|卢布|卢比|加元|澳元|公斤|斤|吨|公里|英里|厘米|毫米|英尺|英寸|公顷|亩|"
    r"小时|分钟|华氏|摄氏|升|加仑"
)
_SAME_UNIT = {"港元": "港币"}
_NOT_NEGATED = re.compile(
    r"(.)[不没]\1|是否|能否|可否|有否|不过|不同|不仅|不但|不管|不论|对不起|非常|除非|无论|未来|未婚夫|别人|特别|区别|级别|分别|类别|性别|"
    r"识别|否则|差不多|不得不|了不起|非洲|告别"
)
_NEGATION = re.compile(r"[不没无非未别勿莫禁]")
_NUMBER = re.compile(r"[零〇一二两三四五六七八九十百千万亿半]+")
_DIGITS = {numeral: str(value) for value, numeral in enumerate("零一二三四五六七八九十")} | {"两": "2", "〇": "0"}
# Small words that may stand anywhere; what joins two equals among them.
_LOOSE = re.compile(
    r"请问|为什么|什么时候|什么|怎么样|怎么办|怎么|如何|怎样|哪里|哪儿|哪个|哪些|多少|多久|是不是|有没有|能不能|可不可以|是否|能否|或者|还是|以及|"
    r"可以|需要|应该|能够|一个|[的了吗呢吧啊呀么哪谁几是在要能会可个和与跟或及一这那就都也才]"
)
# Says how well, how certainly, whose or by doing what, and narrows nothing.
_ADDS_NOTHING = re.compile(
    r"最好|最佳|官方|正式|准确|确切|具体|完整|主|一般|通常|正确|常见|总|全|必须|得|想|知道|帮|给|告诉|我|你|您|把|"
    r"有|做|用|使用|进行|大概|大约|快速|轻松|当中|中|里|上|们|城市|地方|名字|称|名称|个|人|样|种|类|步骤|方法|办法|时?候|"
    r"前|后|以|之|为|向|从|对|让|来|去|被|由|什|吧|究竟|到底|其"
)
_MOST_CHARACTERS = 48
_LONG = 16  # characters: more than most questions have


class _Features(msgspec.Struct, frozen=True):
    characters: Counter[str]
    text: str
    numbers: tuple[str, ...]
    negations: int
    relations: Counter[str]
    asked_for: str | None
    units: frozenset[str]
    quantifiers: frozenset[str]
    must: bool
    may: bool
    order: str
    voice: str | None


def is_chinese(text: str) -> bool:
    """Whether a text is written in Chinese characters, and in no Japanese ones."""
    return bool(_HAN.search(text)) and not _KANA.search(text)


def without_chinese(text: str) -> str:
    """The text with a blank for every Chinese character."""
    return _HAN.sub(" ", text)


def objection(a: str, b: str) -> str | None:
    """The first guard that objects to the pair, or None. Symmetric in its arguments."""
    first, second = _features(a), _features(b)
    if first.numbers != second.numbers:
        return "numbers"
    if first.units and second.units and first.units != second.units:
        return "units"
    if first.negations != second.negations:
        return "negation"
    if _opposites(first, second):
        return "antonym"
    only_first, only_second = first.relations - second.relations, second.relations - first.relations
    if any({kind, other} in _EXCLUDE for kind in only_first for other in only_second):
        return "relation"
    if conflict(first.quantifiers, second.quantifiers):
        return "quantifier"
    if (first.must, first.may, second.must, second.may) in ((True, False, False, True), (False, True, True, False)):
        return "modality"
    if first.asked_for and second.asked_for and first.asked_for != second.asked_for:
        return "question"
    if _rearranged(first.text, second.text):
        return "order"
    if _who_turned(first.text, second.text) or _who_turned(second.text, first.text):
        return "order"
    if _turned(first.order, second.order) or _voice_turned(first, second) or _voice_turned(second, first):
        return "order"
    return None


def narrowed(a: str, b: str) -> bool:
    """Whether one text is the other with words put in at one place, small ones aside. For short texts."""
    short, long = sorted((_features(a).order, _features(b).order), key=len)
    added = len(long) - len(short)
    if not added or len(short) > _LONG:
        return False
    begin = next((i for i, character in enumerate(short) if character != long[i]), len(short))
    return short[begin:] == long[begin + added :] and bool(_ADDS_NOTHING.sub("", long[begin : begin + added]))


@lru_cache(maxsize=4096)
def _features(text: str) -> _Features:
    whole = unicodedata.normalize("NFKC", text).translate(_SIMPLIFIED).replace("将", "把")
    plain = _FRAME.sub("", "".join(character for character in whole if character.isalnum()))
    asserted = _NOT_NEGATED.sub("", plain)
    return _Features(
        characters=Counter(_HAN.findall(plain)),
        text=plain,
        numbers=tuple(sorted(_DIGITS.get(found, found) for found in _NUMBER.findall(plain) if found != "一")),
        negations=len(_NEGATION.findall(asserted)),
        relations=Counter(kind for kind, pattern in _KINDS.items() for _ in pattern.findall(plain)),
        units=frozenset(_SAME_UNIT.get(found, found) for found in _UNITS.findall(plain)),
        quantifiers=chinese_quantifiers(plain),
        must=bool(_MUST.search(whole)),
        may=bool(_MAY.search(whole)),
        asked_for=next((kind for kind, pattern in _ASKED_FOR if re.search(pattern, plain)), None),
        order="".join(_HAN.findall(_LOOSE.sub("", plain))),
        voice="被" if "被" in plain else "把" if "把" in plain else None,
    )


def _opposites(first: _Features, second: _Features) -> bool:
    only_first, only_second = first.characters - second.characters, second.characters - first.characters
    if any(frozenset((one, other)) in _OPPOSITES for one in only_first for other in only_second):
        return True
    return any(
        one in here.text and other in there.text and one not in there.text and other not in here.text
        for one, other in _OPPOSITE_WORDS
        for here, there in ((first, second), (second, first))
    )


def _who_turned(asks_first: str, asks_last: str) -> bool:
    """Whether one text asks who does it ("谁打败了他"), the other to whom it is done ("他打败了谁").

    "谁是总统" and "总统是谁" ask the same.
    """
    return bool(re.match(r"谁(?!是)", asks_first) and re.search(r"(?<!是)谁[呢啊呀]?$", asks_last))


def _turned(a: str, b: str) -> bool:
    """Whether three characters, each once in both texts, stand the other way round: two things around a third."""
    once = {character for character, count in Counter(a).items() if count == 1}
    once &= {character for character, count in Counter(b).items() if count == 1}
    place = {character: i for i, character in enumerate(character for character in b if character in once)}
    places = [place[character] for character in a if character in once]
    # Of characters that stay side by side, one stands for all.
    kept = [places[0]] if places else []
    kept += [following for before, following in pairwise(places) if following != before + 1]
    if len(kept) > _MOST_CHARACTERS:
        return kept != sorted(kept)
    return any(x > y > z for x, y, z in combinations(kept, 3))


def _rearranged(a: str, b: str) -> bool:
    """Whether the characters that two long texts share stand in another order.

    In a question, a phrase that moves as a whole says the same. In a long sentence it cannot be told from two names
    that changed places ("距离甲地 78 公里，乙地 37 公里"), and embedders that add up words see no difference there.
    """
    if min(len(a), len(b)) < _LONG:
        return False
    return (Counter(a) & Counter(b)).total() > _longest_common_subsequence(a, b)


def _longest_common_subsequence(a: str, b: str) -> int:
    """Its length, with a row of the usual table in the bits of one integer (Hyyrö 2004)."""
    places: dict[str, int] = {}
    for i, character in enumerate(a):
        places[character] = places.get(character, 0) | 1 << i
    everywhere = row = (1 << len(a)) - 1  # a bit that is 0 is a step of the subsequence's length
    for character in b:
        matched = row & places.get(character, 0)
        row = ((row + matched) | (row - matched)) & everywhere
    return len(a) - row.bit_count()


def _voice_turned(marked: _Features, plain: _Features) -> bool:
    """Whether only one text says "X 把 Y" or "X 被 Y", and the other has X and Y the wrong way round for that."""
    if marked.voice is None or plain.voice == marked.voice:
        return False
    before, _, after = marked.order.partition(marked.voice)
    wanted = "before" if marked.voice == "把" else "after"
    for one in set(before) & set(plain.order) - set(after):
        for other in set(after) & set(plain.order) - set(before):
            found = "before" if plain.order.index(one) < plain.order.index(other) else "after"
            if found != wanted:
                return True
    return False
