"""What an answer depends on: questions that ask about the time or the asker, beside those that only speak of them."""

from __future__ import annotations

import pytest

from cache.words.dependence import on_asker, on_time


@pytest.mark.parametrize(
    "text",
    [
        "What's on TV tonight?",
        "What is the weather like?",
        "who won the match yesterday",
        "What time is it now?",
        "Now what is the time?",
        "What's the day of the week?",
        "Tell me the latest news about the coronavirus",
        "What is the exchange rate between dollars and euros?",
        "How is the exchange rate doing?",
        "What is the price of gold today?",
        "Is the dollar strong against the yen today?",
        "Am I supposed to attend any meetings today?",
        "I want to know what is on today",
        "I am in Paris today. What is the weather like?",
        "I am free tomorrow, which films are on?",
        "I have a day off today, who is playing?",
        "Let me hear all meetings for today",
        "Find flights for next week",
        "What is the current account balance?",
        "current interest rates",
        "Which version is up to date?",
        "今天北京的天气怎么样",
    ],
)
def test_questions_about_the_time(text: str) -> None:
    assert on_time(text)


@pytest.mark.parametrize(
    "text",
    [
        "I bought something yesterday and the payment is still pending. What should I do?",
        "My card was declined this morning, why?",
        "I used my card to top up, but now I don't see the money in my account.",
        "I got mugged yesterday and they took everything. I can't use the app!",
        "I recently made a transfer. How do I cancel it?",
        "I topped up two days ago and it hasn't arrived. What is going on?",
        "Last week I put a cash deposit into my account and it still isn't there.",
        "What do I do now that I can't use this card?",
        "I forgot my passcode. What now?",
        "I think my transfer failed. What should I do now?",
        "When I got cash, my exchange rate was off.",
        "How is the exchange rate determined?",
        "The exchange rate was wrong.",
        "Can I open a current account?",
        "What is electric current?",
        "How do I know?",
        "What is a river?",
    ],
)
def test_speaking_of_a_time_is_no_question_about_it(text: str) -> None:
    assert not on_time(text)


@pytest.mark.parametrize(
    "text",
    [
        "What is my name?",
        "what's my pin number",
        "Tell me my account balance",
        "Can you see my new balance yet?",
        "How much is my salary?",
        "Where is my order?",
        "What is on my calendar for March 2nd?",
        "Is my reservation confirmed?",
        "Cancel my appointment",
        "who am i",
        "How old am I?",
        "How much did I spend on food?",
        "How much do I owe?",
        "Do I have any meetings?",
        "What is my credit limit?",
        "Where did I put my phone?",
        "can you locate my phone",
        "show me my recent transactions",
        "Write to ann.lee@example.com",
        "Is 4111 1111 1111 1111 a valid card?",
        "Call me at +49 170 1234567",
        "我的余额是多少",
    ],
)
def test_questions_about_the_asker(text: str) -> None:
    assert on_asker(text)


@pytest.mark.parametrize(
    "text",
    [
        "How do I change my address?",
        "I want to reset my passcode, how can I do that?",
        "I just moved. How do I give you my new address?",
        "I lost my phone. What should I do?",
        "My phone was stolen, please advise!",
        "Why was my balance not updated?",
        "My balance didn't change after I transferred some money.",
        "Can I receive my salary in another currency?",
        "I got married and need to change my name.",
        "What happens if I forget my password?",
        "How can I improve my credit score?",
        "My card was declined, why?",
        "What is a salary?",
        "Do I have any rights as a tenant?",
    ],
)
def test_asking_how_something_is_done_is_no_question_about_the_asker(text: str) -> None:
    assert not on_asker(text)
