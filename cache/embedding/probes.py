"""Texts by which an embedding backend is calibrated and checked: questions, commands, odd characters."""

from __future__ import annotations

PROBES = (
    "What is the capital of France?",
    "Which city is the capital of France?",
    "What is the capital of Spain?",
    "how do i reset my password",
    "How can I change the password of my account?",
    "I cannot log in any more, what should I do?",
    "Please cancel my subscription at the end of the month.",
    "How do I cancel an order that has not been shipped yet?",
    "Where is my parcel?",
    "My parcel was delivered to the wrong address.",
    "Can I pay in 12 instalments of 49.90 EUR?",
    "What does error code 0x80070057 mean?",
    "Convert 5 miles to kilometers.",
    "Convert 5 kilometers to miles.",
    "Is it safe to eat raw eggs?",
    "It is not safe to eat raw eggs.",
    "Turn the lights on in the kitchen.",
    "Turn the lights off in the kitchen.",
    "Who wrote Pride and Prejudice?",
    "When was the Treaty of Westphalia signed?",
    "Explain how photosynthesis works to a child of ten.",
    "What is the difference between TCP and UDP?",
    "List three advantages of solar power over coal.",
    "Write a short poem about the sea in winter.",
    "Summarise: revenue grew by 8 % to $1.2bn, costs fell by 3 %, and the board proposes a dividend of 40 cents.",
    "def add(a, b): return a + b",
    "SELECT name, COUNT(*) FROM orders GROUP BY name HAVING COUNT(*) > 3;",
    "https://example.com/a/b?c=d&e=f#g",
    "hi",
    "thanks a lot!!!",
    "?",
    "ok",
    "What are the opening hours of the branch in Zürich on public holidays?",
    "Do I need a visa to travel to Brazil with a German passport?",
    "My card payment was declined twice although there is enough money in the account.",
    "Why was I charged a fee for withdrawing cash abroad?",
    "How long does a bank transfer to another country take?",
    "The employee handbook says that travel expenses must be handed in within 30 days. Does that hold for trains, too?",
    "Which documents do I have to bring to open a business account?",
    "Set an alarm for 6:45 a.m. and remind me to take my medicine.",
    "What is the boiling point of water at 3,000 metres?",
    "How many employees does a manager of the sales department have on average?",
    "Translate 'good morning' into Italian.",
    "Who is older, Anna or Ben, if Ben was born two years after Anna?",
    "The printer on the third floor reports a paper jam, but there is no paper in it. I have already switched "
    "it off and on again, opened every flap and cleaned the rollers. What else can I try before I call a "
    "technician?",
    "We plan to move our data warehouse to the cloud next year. Compare the costs of storage, computing and "
    "data transfer for a company with two hundred employees, forty terabytes of data and about a thousand "
    "reports a day, and say which risks we should discuss with the works council and the data protection "
    "officer before we sign anything.",
    "A train leaves at 9:40 and arrives at 13:25 after three stops of six minutes each. The line is 312 "
    "kilometres long. What is its average speed while it moves, and how much earlier would it arrive if it did"
    " not stop at all? Show each step of the calculation, give the result in kilometres per hour with one "
    "decimal, and check it with an estimate.",
    "aaaa bbbb cccc dddd eeee ffff gggg hhhh",
)
