"""The upper estimate of a prompt's tokens, against real tokenizers.

SmolLM2's is always there, and needs more tokens than most: its vocabulary is small and English. `TIERLINE_TOKENIZERS`
names more, as paths of `tokenizer.json` files separated by colons (docs/finance.md has what seven of them said).
"""

from __future__ import annotations

import base64
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFace

from engine.loader import ModelInfo, read_info
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from gateway.access.input_bound import PER_IMAGE, PER_REQUEST, TOOLS, input_bound, text_bound

ROOT = Path(__file__).resolve().parent.parent.parent
Count = Callable[[str], int]

LANGUAGES = {
    "Chinese": "今天下午三点开会，请提前把上个月的销售报告发给大家，并准备好下一季度的预算。",
    "Japanese": "明日の会議は午後三時からです。先月の売上レポートを事前に共有してください。よろしくお願いします。",
    "Korean": "내일 회의는 오후 세 시에 시작합니다. 지난달 매출 보고서를 미리 공유해 주세요.",
    "Russian": "Завтра совещание в три часа дня. Пожалуйста, пришлите заранее отчёт о продажах за прошлый месяц.",
    "Greek": "Η συνάντηση είναι αύριο στις τρεις το απόγευμα. Στείλτε παρακαλώ την αναφορά πωλήσεων.",
    "Arabic": "الاجتماع غدًا في الساعة الثالثة بعد الظهر. يرجى إرسال تقرير المبيعات للشهر الماضي مسبقًا.",
    "Hebrew": "הפגישה מחר בשלוש אחר הצהריים. אנא שלחו מראש את דוח המכירות של החודש שעבר.",
    "Hindi": "बैठक कल दोपहर तीन बजे है। कृपया पिछले महीने की बिक्री रिपोर्ट पहले से भेज दें।",
    "Thai": "การประชุมพรุ่งนี้เวลาบ่ายสามโมง กรุณาส่งรายงานยอดขายของเดือนที่แล้วล่วงหน้า",
    "Vietnamese": "Cuộc họp bắt đầu lúc ba giờ chiều mai. Vui lòng gửi trước báo cáo doanh số tháng trước.",
    "Swahili": "Mkutano utaanza kesho saa tisa mchana. Tafadhali tuma ripoti ya mauzo ya mwezi uliopita mapema.",
    "Finnish": "Kokous alkaa huomenna kello kolme. Toimittakaa viime kuukauden myyntiraportti etukäteen.",
    "German": "Die Sitzung beginnt morgen um drei. Bitte schicken Sie den Verkaufsbericht des letzten Monats vorab.",
    "Polish": "Spotkanie zaczyna się jutro o trzeciej. Proszę przesłać wcześniej raport sprzedaży za zeszły miesiąc.",
    "emoji": "Great job team! 🎉🎉🚀 See you tomorrow 👋🏽 and don't forget the 🍕🍕🍕, ok? 👩‍👩‍👧‍👦🏳️‍🌈",
    "numbers": "2026-11-29 14:03:55.120 10.0.3.77 1,234,567.89 -0.000123 +49 170 5550123 0x7ffe 42/17 99.9%",
    "digits": "7 3 42 1999 5 0 88 2 " * 5,
    "capitals": "THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG, WHILE NASA, UNESCO AND THE IMF WATCH.",
    "log": 'Nov 29 14:03:55 host kernel: [12345.678901] eth0: link up, 1000Mbps, "full-duplex", lpa 0xC5E1\n' * 3,
    "table": "| name  | q1   | q2   |\n|-------|------|------|\n| north | 12.5 | 13.1 |\n| south |  9.9 | 10.4 |\n",
}
FILES = ["README.md", "gateway/**/*.py", "engine/kernels/*.c", "docs/**/*.md", "docs/**/*.json", "deploy/**/*.json"]
TOOL = {
    "type": "function",
    "function": {
        "name": "find_orders",
        "description": "Orders of a customer, newest first.",
        "parameters": {"type": "object", "properties": {"customer": {"type": "string"}, "limit": {"type": "integer"}}},
    },
}


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> ModelInfo:
    return read_info(smollm2_path)


@pytest.fixture(scope="module")
def counts(smollm2: ModelInfo) -> dict[str, Count]:
    """Each tokenizer's own count of a text."""
    tokenizer = Tokenizer(smollm2)
    found: dict[str, Count] = {"SmolLM2": lambda text: len(tokenizer.encode(text, parse_special=False))}
    for path in filter(None, os.environ.get("TIERLINE_TOKENIZERS", "").split(":")):
        other = HuggingFace.from_file(path)
        found[path] = lambda text, other=other: len(other.encode(text, add_special_tokens=False).ids)  # type: ignore[misc]
    return found


def bound(text: str) -> int:
    """Of a message of this text: without what is added once for the request, which is for the template."""
    return input_bound({"messages": [{"role": "user", "content": text}]}) - PER_REQUEST


@pytest.mark.parametrize("language", LANGUAGES)
def test_it_covers_every_script(counts: dict[str, Count], language: str) -> None:
    for text in (LANGUAGES[language], LANGUAGES[language] * 7):
        for name, count in counts.items():
            assert count(text) <= bound(text), name


@pytest.mark.parametrize("pattern", FILES)
def test_it_covers_code_data_and_prose_wherever_they_are_cut(counts: dict[str, Count], pattern: str) -> None:
    order, paths = random.Random(pattern), sorted(ROOT.glob(pattern))
    assert paths
    for _ in range(60):
        text = order.choice(paths).read_text()
        start, length = order.randrange(len(text)), order.choice([40, 200, 1000, 4000])
        piece = text[start : start + length]
        for name, count in counts.items():
            assert count(piece) <= bound(piece), f"{name}: {piece!r}"


def test_data_without_words_passes_it_by_a_sixth_at_most(counts: dict[str, Count]) -> None:
    """Known and documented: letters of no language cost more than words do."""
    order = random.Random(1)
    for _ in range(50):
        raw = order.randbytes(order.choice([30, 300, 3000]))
        for text in (raw.hex(), base64.b64encode(raw).decode()):
            for name, count in counts.items():
                assert count(text) <= 1.15 * bound(text), name


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=200))
def test_no_text_has_more_tokens_than_bytes(counts: dict[str, Count], text: str) -> None:
    assert counts["SmolLM2"](text) <= len(text.encode())
    assert text_bound(text.encode()) <= len(text.encode())


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Hi"}],  # the template puts a system prompt of the model's own in front
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        [{"role": role, "content": "ok"} for role in ("user", "assistant") * 50],
    ],
)
def test_it_covers_the_models_own_template(
    smollm2: ModelInfo, counts: dict[str, Count], messages: list[dict[str, Any]]
) -> None:
    template = ChatTemplate(smollm2.chat_template)
    prompt = template.render(messages, add_generation_prompt=True)
    real = len(Tokenizer(smollm2).encode(prompt))
    assert real <= input_bound({"messages": messages})


def test_everything_that_is_input_counts() -> None:
    message = {"role": "user", "content": "Hi"}
    plain = input_bound({"messages": [message]})
    assert input_bound({"messages": [message], "tools": [TOOL]}) >= plain + TOOLS + len(json.dumps(TOOL)) // 3
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": TOOL["function"]}}
    assert input_bound({"messages": [message], "response_format": schema}) > plain + 60
    assert input_bound({"messages": [message], "response_format": {"type": "json_object"}}) == plain
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}, picture]}
    assert input_bound({"messages": [parts]}) == plain + PER_IMAGE
    sound = {"type": "input_audio", "input_audio": {"format": "wav", "data": "A" * 256_000}}
    assert 1000 < input_bound({"messages": [{"role": "user", "content": [sound]}]}) - plain < 1010
    call = {"id": "call_1", "type": "function", "function": {"name": "find_orders", "arguments": '{"customer": "x"}'}}
    assert input_bound({"messages": [{"role": "assistant", "content": "Hi", "tool_calls": [call]}]}) > plain + 30
    assert input_bound({"messages": [{**message, "name": "Alexandra"}]}) > plain + 3
