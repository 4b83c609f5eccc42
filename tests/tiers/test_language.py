"""The language of texts: sentences of each that the detector names, and texts that it had better leave alone."""

from __future__ import annotations

import pytest

from tiers.language import LANGUAGES, language_of

SENTENCES = {
    "en": [
        "What is the capital of Australia?",
        "Please rewrite this email so that it sounds more polite.",
        "How do I sort a list of dictionaries by a value in Python?",
        "Is this review positive or negative? The pizza was cold.",
    ],
    "de": [
        "Wie heißt die Hauptstadt von Australien?",
        "Bitte schreibe diese E-Mail so um, dass sie höflicher klingt.",
        "Wie sortiere ich eine Liste nach dem zweiten Wert?",
        "Fasse den folgenden Text in drei Sätzen zusammen und nenne die Autoren.",
    ],
    "fr": [
        "Quelle est la capitale de l'Australie ?",
        "Réécris ce courriel pour qu'il soit plus poli avec le client.",
        "Comment trier une liste par une valeur en Python ?",
        "Est-ce que cette critique est positive ou négative ?",
    ],
    "es": [
        "¿Cuál es la capital de Australia y por qué?",
        "Reescribe este correo para que sea más amable con el cliente.",
        "¿Cómo ordeno una lista por un valor en Python?",
        "Resume el siguiente texto en tres frases, por favor.",
    ],
    "pt": [
        "Qual é a capital da Austrália?",
        "Reescreve este e-mail para que seja mais educado com o cliente.",
        "Como é que eu ordeno uma lista por um valor em Python?",
        "Você pode resumir o texto em três frases?",
    ],
    "it": [
        "Qual è la capitale dell'Australia e perché?",
        "Riscrivi questa email in modo che sia più gentile con il cliente.",
        "Come si ordina una lista per un valore in Python?",
        "Riassumi il testo seguente in tre frasi e di' chi è l'autore.",
    ],
    "nl": [
        "Wat is de hoofdstad van Australië?",
        "Herschrijf deze e-mail zodat hij beleefder is voor de klant.",
        "Hoe kan ik een lijst op de tweede waarde sorteren?",
        "Is deze recensie positief of negatief? De pizza was koud.",
    ],
    "sv": [
        "Vad är huvudstaden i Australien och varför?",
        "Skriv om det här mejlet så att det är mer artigt för kunden.",
        "Hur kan jag sortera en lista efter ett värde i Python?",
        "Sammanfatta texten i tre meningar och säg vem som har skrivit den.",
    ],
    "pl": [
        "Jak się nazywa stolica Australii i dlaczego?",
        "Przepisz ten e-mail tak, żeby był bardziej uprzejmy dla klienta i nie za długi.",
        "Jak posortować listę po wartości w Pythonie i co to jest?",
    ],
    "tr": [
        "Avustralya'nın başkenti neresi ve neden?",
        "Bu e-postayı müşteri için daha kibar bir şekilde yaz.",
        "Bir liste nasıl sıralanır ve bu ne kadar sürer?",
    ],
    "vi": [
        "Thủ đô của Úc là gì?",
        "Hãy viết lại email này để nó lịch sự hơn với khách hàng.",
        "Làm thế nào để sắp xếp một danh sách trong Python?",
    ],
    "id": [
        "Apa ibu kota Australia dan mengapa?",
        "Tolong tulis ulang email ini dengan lebih sopan untuk pelanggan.",
        "Bagaimana cara mengurutkan daftar ini dan apa itu daftar?",
    ],
    "zh": [
        "澳大利亚的首都是哪里？",
        "请把下面的 Python 代码改写得更清楚。",
        "如何开启深色模式",
        "這封信要怎麼寫才比較有禮貌？",
    ],
    "ja": ["オーストラリアの首都はどこですか？", "次のPythonコードを説明してください。", "日本語の文章を要約して"],
    "ko": ["호주의 수도는 어디인가요?", "다음 Python 코드를 설명해 주세요."],
    "ru": ["Какая столица у Австралии?", "Перепиши это письмо вежливее, пожалуйста."],
    "uk": ["Яка столиця Австралії і чому?"],
    "ar": ["ما هي عاصمة أستراليا؟"],
    "fa": ["پایتخت استرالیا چیست؟"],
    "hi": ["ऑस्ट्रेलिया की राजधानी क्या है?"],
    "bn": ["অস্ট্রেলিয়ার রাজধানী কী?"],
    "ta": ["ஆஸ்திரேலியாவின் தலைநகரம் எது?"],
    "th": ["เมืองหลวงของออสเตรเลียคืออะไร"],
    "he": ["מהי בירת אוסטרליה?"],
    "el": ["Ποια είναι η πρωτεύουσα της Αυστραλίας;"],
}


@pytest.mark.parametrize(("language", "text"), [(code, text) for code, texts in SENTENCES.items() for text in texts])
def test_a_sentence_is_in_its_language(language: str, text: str) -> None:
    assert language_of(text) == language


def test_every_language_has_a_sentence_here() -> None:
    assert set(SENTENCES) == set(LANGUAGES)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   \n",
        "ok",
        "Berlin",
        "12 + 30 = 42",
        "GPT-4o",
        "🙂🙂🙂",
        "\ud800",
        "Invoice 2024-11 ACME GmbH EUR 1,200",
        "λ",
        "a",
        "SELECT id, name FROM users;",
        "{}[]();",
        "la la la",
        "http://example.com/x?y=z",
    ],
)
def test_what_nobody_can_be_sure_of_has_none(text: str) -> None:
    assert language_of(text) == ""


def test_the_most_of_a_mixed_text_counts() -> None:
    assert (
        language_of("Translate this into English, and explain every word of it that a child may not know: 你好") == "en"
    )
    assert language_of("Translate: 澳大利亚的首都是堪培拉，它位于悉尼和墨尔本之间。") == "zh"
    assert language_of("What does Здравствуйте mean, and how do I say it to a friend?") == "en"


def test_only_the_beginning_of_a_long_text_is_looked_at() -> None:
    assert language_of("What is the meaning of this? " * 100 + "澳大利亚" * 10_000) == "en"
