"""Instruction prompts made from patterns: everyday tasks for which public data with task labels hardly exists.

Each pattern is an instruction with slots; the texts it works on come from the other corpora, so that the classifier
learns the instruction and not the text. Deterministic for a given seed.
"""

from __future__ import annotations

import random
from typing import Any, Final

_LABELS: Final = (
    "positive, negative, neutral", "billing, technical, account, other", "spam or not spam", "yes or no",
    "urgent, normal, low", "complaint, praise, question", "sports, politics, business, science",
    "refund, exchange, delivery, cancellation", "true or false", "bug, feature request, question",
    "happy, angry, sad, surprised", "fraud or legitimate", "A, B or C", "relevant or irrelevant",
    "English, French, German, Spanish", "invoice, contract, letter, receipt", "up, down, none",
    "hate speech, offensive, neither", "1 to 5 stars", "formal or informal",
)  # fmt: skip
_FIELDS: Final = (
    "all names and dates", "the order number, the amount and the date", "every email address", "people and places",
    "the product names", "all phone numbers", "name, company and job title", "the key figures", "all named entities",
    "the city and the postal code", "deadlines and owners", "the invoice number and the total", "all URLs",
    "symptoms and medications", "the skills and years of experience", "the price, colour and size",
    "the parties and the effective date", "the flight number and the departure time", "the action items",
    "the amounts of money mentioned", "the relations between the entities", "the address",
)  # fmt: skip
_LANGUAGES: Final = (
    "French", "German", "Spanish", "Italian", "Portuguese", "Dutch", "Polish", "Chinese", "Japanese", "Korean",
    "Arabic", "Hindi", "Russian", "Turkish", "Swedish", "English", "Greek", "Czech", "Vietnamese",
    "Simplified Chinese",
)  # fmt: skip
_STYLES: Final = (
    "more formal", "friendlier", "shorter", "clearer", "more polite", "more professional", "simpler",
    "less technical", "more persuasive", "in plain English", "in the passive voice", "for a child",
    "in a neutral tone", "more concise", "in the third person", "gender-neutral", "in British English",
    "easier to read",
)  # fmt: skip
_TOPICS: Final = (
    "the new office", "remote work", "our spring sale", "a lost parcel", "climate change", "a trip to Rome",
    "learning the piano", "data privacy", "a delayed project", "healthy food", "our new app", "the team offsite",
    "electric cars", "a birthday party", "a job interview", "saving money", "a small garden",
    "artificial intelligence", "a lighthouse keeper", "an old dragon", "customer loyalty", "the night sky",
    "time management", "a coffee shop", "photosynthesis", "inflation", "the French Revolution", "black holes",
    "blockchain", "vaccines", "neural networks", "supply chains", "the water cycle", "insurance", "microservices",
    "public speaking", "the stock market",
)  # fmt: skip
_FORMS: Final = (
    "an email", "a short story", "a poem", "a blog post", "a cover letter", "a press release", "a speech", "a tweet",
    "a product description", "a LinkedIn post", "a thank-you note", "an essay", "a haiku", "a letter", "a dialogue",
    "an invitation", "a newsletter", "a job advertisement", "an apology", "a review", "a song", "a bedtime story",
)  # fmt: skip

# kind -> instructions. {x} is a text; a pattern without {x} gets none.
_PATTERNS: Final[dict[str, tuple[str, ...]]] = {
    "label_text": (
        "How urgent is this ticket ({labels})?\n\n{x}", "Give this message a tag from: {labels}.\n\n{x}",
        "Judge the tone of the text: {labels}.\n{x}", "Mark each line as {labels}:\n1. {x}\n2. {y}",
        "Rate this comment as {labels}: {x}", "Does this message need a human? Answer {labels}.\n\n{x}",
        "Which of {labels} describes the text below?\n\n{x}", "Grade the answer as {labels}.\nAnswer: {x}",
        "Screen this application and answer {labels}.\n\n{x}",
        "Choose the best category from the list {labels} for: {x}", "Classify the following text as {labels}.\n\n{x}",
        "Which category fits best: {labels}?\n{x}",
        "Label this message. Possible labels: {labels}.\nMessage: {x}\nLabel:",
        "What is the sentiment of this review? Answer with one word.\n\n{x}",
        "Is the following message {labels}? Answer with the label only.\n{x}",
        "You are a classifier. Reply with exactly one of: {labels}.\n\nText: {x}",
        "Determine the intent of the customer. Choose from {labels}.\n\"{x}\"",
        "Assign one of these tags to the ticket: {labels}\n\n{x}", "Text: {x}\n\nCategory ({labels}):",
        "Categorise each message below into {labels}.\n- {x}\n- {y}", "Detect the language of this text: {x}",
        "Decide whether the two sentences mean the same. Answer yes or no.\n1. {x}\n2. {y}",
        "Route this request to the right department ({labels}): {x}", "Rate the toxicity of this comment: {x}",
        "Does the passage support the claim? Answer supported or not supported.\nClaim: {y}\nPassage: {x}",
        "Sort this feedback into {labels}: {x}", "Pick the topic of the article from: {labels}.\n\n{x}",
        "Tell me if this email is {labels}.\n\n{x}", "Sentiment?\n{x}", "{x}\n\nIs this {labels}?",
        "Q: {x}\nA ({labels}):", "Output only the label ({labels}) for the input.\nInput: {x}\nOutput:",
    ),
    "extract_fields": (
        "Which {fields} does the text contain?\n\n{x}", "Collect {fields} from these notes into a list:\n{x}\n{y}",
        "Fill this form from the message. Fields: {fields}.\n\n{x}", "Take {fields} from the text below:\n\n{x}",
        "Locate {fields} in the log and print them one per line.\n\n{x}",
        "Turn this message into JSON with {fields}.\n{x}", "Extract {fields} from the text below.\n\n{x}",
        "List {fields} mentioned in this message:\n{x}",
        "From the following document, pull out {fields} and return JSON.\n\n{x}",
        "Find {fields} in the text. Return null where nothing is given.\n\nText: {x}",
        "Return {fields} as a JSON object.\n{x}", "What are {fields} in this paragraph?\n\n{x}",
        "Parse this email and give me {fields}: {x}", "Identify {fields} in: \"{x}\"",
        "Read the note and fill in the table with {fields}.\n\nNote: {x}", "{x}\n\nExtract {fields}.",
        "You extract structured data. Output {fields} as JSON, nothing else.\n\n{x}", "Get {fields} out of this: {x}",
        "Which {fields} appear here? {x}", "Copy the sentence that names the cause:\n{x}",
        "Convert this text to a CSV with {fields}.\n{x}", "Highlight {fields} in the passage:\n{x}",
        "Answer using only words from the passage: who is it about?\n\n{x}",
        "Retrieve {fields} from the contract:\n\n{x}",
    ),
    "summarise_text": (
        "Summarise this article: {long}", "Summarize this: {x} {y}", "Summarise the article below.\n\n{x} {y} {x}",
        "Please summarize this email: {x} {y}", "Summarise in one sentence: {x} {y}",
        "Sum up the following in three bullet points:\n{long}", "Sum this up for a busy reader: {long}",
        "Give me the gist.\n\n{long}", "Shorten this article to its core:\n{long}",
        "What is this text about?\n\n{long}", "Outline the main arguments of the passage below.\n{long}",
        "Make a short version of this report:\n\n{long}", "Summarise the following text in two sentences.\n\n{long}",
        "Give me a short summary of this article:\n{long}", "TL;DR\n{long}", "What are the main points?\n\n{long}",
        "Summarize the meeting notes below as bullet points.\n{long}", "Write an abstract for this text: {long}",
        "Condense this to one paragraph:\n\n{long}", "{long}\n\nSummary:",
        "Create an executive summary of the report.\n\n{long}", "In one sentence, what does this text say?\n{long}",
        "Boil this conversation down to the essentials:\n{long}", "Give the key takeaways of the following:\n{long}",
        "You summarise support tickets for managers.\n\n{long}",
        "Recap the discussion below for someone who was not there:\n{long}",
        "Please provide a brief overview of the text.\n\n{long}", "Write a headline that sums up this story: {long}",
    ),
    "rewrite_text": (
        "Reword this so that it is {style}.\n\n{x}", "Could this be put {style}?\n{x}", "Clean up this text:\n{x}",
        "Make my message sound {style}: {x}", "Correct the mistakes in my letter:\n\n{x}",
        "Rewrite this {style}: {x}", "Make the following text {style}.\n\n{x}", "Correct the grammar: {x}",
        "Paraphrase this sentence: {x}", "Fix the spelling and punctuation.\n{x}", "Proofread my text:\n\n{x}",
        "Rephrase so that it sounds {style}:\n\"{x}\"", "Improve the wording of this paragraph.\n\n{x}",
        "Edit the message below to be {style}.\n{x}", "Can you say this differently? {x}", "{x}\n\nMake it {style}.",
        "Simplify the following for a general audience: {x}",
        "Change the tone of this reply: it should be {style}.\n{x}", "Polish this draft:\n{x}",
        "Expand this sentence with more detail: {x}", "Shorten this to 20 words: {x}",
        "Turn this into the past tense: {x}", "Convert these notes to full sentences:\n{x}",
        "Remove the filler words: {x}", "Anonymise this text by replacing all names:\n{x}",
    ),
    "translate_text": (
        "Translate to {language}: {x}", "Translate the following text into {language}.\n\n{x}",
        "{x}\n\nIn {language}, please.", "How do you say \"{x}\" in {language}?",
        "Please translate this email into {language}:\n{x}", "What is the {language} for: {x}",
        "Give me the {language} version of this sentence: {x}",
        "You are a translator from English to {language}.\n\n{x}", "English: {x}\n{language}:",
        "Translate from {language} to English: {x}", "Localise these strings for {language}:\n{x}",
        "Render the following in {language}, keep the formatting.\n{x}",
        "Translate into {language} and {language2}: {x}",
    ),
    "small_talk": (
        "Hi!", "Hello there", "hey, how are you?", "Good morning! How is it going?", "Thanks, that helped a lot!",
        "Say hello", "Say hi to my friend", "Who are you?", "What can you do?", "Tell me a joke",
        "I'm bored, let's chat", "What's your name?", "How was your day?", "Good night", "I had a bad day today.",
        "Can we talk about {topic}?", "Do you like {topic}?", "What do you think about {topic}?",
        "I feel a bit lonely lately", "My friend is worried about {topic}, what should I tell her?", "You are funny",
        "Let's talk about {topic}", "ok", "yes please", "no thanks", "Are you human?", "Nice to meet you",
        "I am excited about {topic}!", "Cheer me up", "Greet the user in a friendly way", "How old are you?",
    ),
    "write_text": (
        "Write {form} about {topic}.", "Compose {form} on the subject of {topic}.",
        "Draft {form} that announces {topic}.", "I need {form} about {topic}, around 200 words.",
        "Create {form} for {topic} in a warm tone.", "Please write {form} to my manager about {topic}.",
        "Can you write me {form} on {topic}?", "Reply to this email politely:\n\n{x}",
        "Write {form} in the style of a famous author about {topic}.",
        "Answer this customer message in a friendly way:\n{x}", "Help me write {form} for {topic}.",
        "Produce {form} with three paragraphs about {topic}.", "Continue this story: {x}", "Write a response to: {x}",
    ),
    "list_ideas": (
        "Give me ten ideas for {topic}.", "Brainstorm names for a project about {topic}.",
        "Suggest five ways to improve {topic}.", "List things to consider before {topic}.",
        "What are some creative ideas for {topic}?", "Come up with slogans for {topic}.",
        "Recommend books about {topic}.", "Make a checklist for {topic}.", "Think of questions to ask about {topic}.",
        "Propose topics for a workshop on {topic}.", "What could we do about {topic}? Give options.",
        "Give me a list of gifts related to {topic}.", "Name some hobbies similar to {topic}.",
        "Suggest a three-day itinerary around {topic}.", "Help me come up with titles for a talk on {topic}.",
    ),
    "explain_topic": (
        "Explain {topic} to a beginner.", "How does {topic} work?", "What is {topic}?",
        "What is the difference between {topic} and {topic2}?", "Why is {topic} important?",
        "Can you explain {topic} in simple terms?", "Tell me about {topic}.", "How do I get started with {topic}?",
        "Describe the history of {topic}.", "What causes problems with {topic}?", "What are the benefits of {topic}?",
        "Give an introduction to {topic} for students.", "What does {topic} mean?",
        "How can I learn more about {topic}?", "What should I know about {topic}?", "Define {topic}.",
    ),
    "analyse_situation": (
        "Analyse the risks of {topic} and recommend a course of action with your reasoning.",
        "Our company plans {topic}. Compare three strategies, weigh the trade-offs and decide.",
        "Given the constraints below, work out the best plan and justify each step.\n{x}\n{y}",
        "Evaluate the argument below. Which assumptions does it make, and does the conclusion follow?\n\n{long}",
        "Design an experiment to test whether {topic} affects {topic2}. Discuss confounders.",
        "What would happen to the economy if {topic} disappeared? Reason through second-order effects.",
        "Develop a detailed strategy for {topic} over the next five years, with milestones and risks.",
        "Diagnose the root cause of the incident from the timeline below.\n{long}",
        "Assess whether we should invest in {topic}; build the case for and against and quantify it.",
        "Estimate how many people deal with {topic} in Europe. State your assumptions.",
        "Review this contract clause, point out what could go wrong, and propose a better one.\n{x}",
        "Act as a senior consultant: how should a mid-sized firm respond to {topic}? Consider costs, law and people.",
    ),
    "software_work": (
        "How do I {action} in {tech}?", "Write a {tech} script to {action}.", "My {tech} code does not work:\n{x}",
        "Fix this {tech} error: TypeError: cannot read property 'id' of undefined",
        "Create a {tech} app that can {action}.", "Explain how to {action} with {tech} and show code.",
        "Set up {tech} on Ubuntu to {action}.", "Refactor this {tech} class so that it can {action}.",
        "Show me an example of how to {action} using {tech}.", "Why does {tech} fail when I {action}?",
        "Give me the code to {action} in {tech}.", "Add tests to this {tech} module.",
        "Review my {tech} code and find the bug.", "I have a {tech} project. I want to {action}. How can I do that?",
        "What is the best way to {action} in {tech}?", "Convert this {tech} program to {tech2}.",
        "Implement {action} in {tech}.", "Write a {tech} function that is able to {action}, with error handling.",
        "{action} {tech}", "Design a database schema to {action}.", "build a small website with {tech} to {action}",
        "write code for {tech} that would {action} and explain it", "Can you optimise this {tech} query?",
        "Configure {tech} so that users can {action}.", "Write a SQL query to {action}.",
        "Write a regex to {action}.",
    ),
    "write_function": (
        "Write a {tech} function to {action}.", "Write a function that returns the {thing} of a list.",
        "Implement a function to compute the {thing} of two numbers in {tech}.",
        "def solve(items):\n    \"\"\"Return the {thing}.\"\"\"",
        "Write a python function to find the {thing} in a given array.",
        "Given an array, return its {thing}. Write {tech} code.",
    ),
    "recall_fact": (
        "Who invented {topic}?", "When did {topic} begin?", "What is the capital of {place}?",
        "Which country is {place} in?", "What is the population of {place}?",
        "Who wrote a famous book about {topic}?", "In which year was {place} founded?",
        "What currency is used in {place}?", "What is the highest mountain in {place}?", "Where is {place}?",
        "What language do people speak in {place}?", "Who is the head of state of {place}?",
        "How tall is the tower in {place}?", "When was the first flight to {place}?",
        "Tell me the name of the longest river in {place}.",
    ),
    "word_problem": (
        "{name} buys 4 books at $7 each and pays with a $50 note. How much change does {name} get?",
        "A train leaves at 9:15 and arrives at 12:40. How long does the journey take?", "What is 15% of 240?",
        "{name} has 24 apples and gives a third to Anna. How many are left?", "Convert 5 miles to kilometres.",
        "If 3 painters need 6 days, how many days do 9 painters need?", "What is 17 * 23?",
        "Calculate the VAT of 19% on 350 euros.", "A tank fills at 12 litres per minute. How long until 300 litres?",
        "Solve for x: 3x + 7 = 22",
    ),
    "logic_puzzle": (
        "Anna is older than Ben. Ben is older than {name}. Who is the youngest? Explain your deduction.",
        "Anna, {name} and Carl each own one pet: a cat, a dog, a fish. {name} hates water. Who owns the fish?",
        "If all bloops are razzies and some razzies are lazzies, must some bloops be lazzies? Prove it.",
        "{name} says Carl lies. Carl says both lie. Who tells the truth?",
        "Five friends sit in a row. {name} sits left of Dora, Eva next to Frank. Where can Gus sit?",
        "A farmer crosses a river with a wolf, a goat and a cabbage; {name} helps once. How many trips?",
        "One statement is true. 1: {name} took the cake. 2: Carl did not. 3: 1 is false. Who took it?",
        "Of 12 coins one is lighter. {name} says two weighings suffice to find it. Is that right?",
    ),
}  # fmt: skip
_TECH: Final = (
    "Python", "JavaScript", "TypeScript", "Java", "C++", "C#", "Rust", "Go", "Kotlin", "Swift", "Ruby", "PHP", "SQL",
    "Bash", "React", "Vue", "Django", "Flask", "Laravel", "Docker", "Kubernetes", "Terraform", "PostgreSQL", "Linux",
    "nginx", "pandas", "PyTorch", "Node.js", "Excel VBA", "MATLAB", "R", "Haskell", "WordPress", "Android",
    "AWS Lambda", "Unity",
)  # fmt: skip
_ACTIONS: Final = (
    "read a CSV file", "sort a list of objects", "send an email", "parse JSON", "connect to a database",
    "resize images", "scrape a website", "run tasks in parallel", "log in with OAuth", "upload a file",
    "validate user input", "cache results", "plot a histogram", "merge two tables", "remove duplicates",
    "count words", "draw a circle", "deploy a service", "reverse a string", "find prime numbers", "schedule a job",
    "stream a video", "encrypt a file", "monitor CPU usage", "match email addresses", "select the ten newest rows",
    "group sales by month", "train a model", "restart on failure",
)  # fmt: skip
_THINGS: Final = (
    "maximum", "median", "sum of squares", "longest palindrome", "second largest element", "greatest common divisor",
    "running average", "most frequent item", "missing number", "largest sublist", "sorted union", "number of vowels",
)  # fmt: skip
_PLACES: Final = (
    "France", "Japan", "Brazil", "Kenya", "Canada", "Paris", "Oslo", "Lima", "Egypt", "Vietnam", "Texas", "Berlin",
    "Chile",
)  # fmt: skip
_NAMES: Final = ("Ben", "Maya", "Omar", "Lena", "Tom", "Ines", "Yuki", "Paul")


def prompts(kind: str, count: int, texts: list[str], seed: int) -> list[list[dict[str, Any]]]:
    """`count` conversations of one kind; the instruction stands before the text, after it, or in the system prompt."""
    rng = random.Random(f"{kind}:{seed}")
    return [_one(rng, kind, texts) for _ in range(count)]


def kinds() -> list[str]:
    """Kinds that have patterns."""
    return list(_PATTERNS)


def _one(rng: random.Random, kind: str, texts: list[str]) -> list[dict[str, Any]]:
    pattern = rng.choice(_PATTERNS[kind])
    long = " ".join(rng.choice(texts) for _ in range(rng.randint(4, 14)))
    slots = {
        "x": rng.choice(texts),
        "y": rng.choice(texts),
        "long": long,
        "labels": rng.choice(_LABELS),
        "fields": rng.choice(_FIELDS),
        "language": rng.choice(_LANGUAGES),
        "language2": rng.choice(_LANGUAGES),
        "style": rng.choice(_STYLES),
        "form": rng.choice(_FORMS),
        "topic": rng.choice(_TOPICS),
        "topic2": rng.choice(_TOPICS),
        "name": rng.choice(_NAMES),
        "tech": rng.choice(_TECH),
        "tech2": rng.choice(_TECH),
        "action": rng.choice(_ACTIONS),
        "thing": rng.choice(_THINGS),
        "place": rng.choice(_PLACES),
    }
    head, separator, tail = pattern.partition("\n\n")
    # A quarter of the two-part prompts put the instruction into the system prompt, as applications do.
    if separator and "{x}" not in head and "{long}" not in head and rng.random() < 0.25:
        return [
            {"role": "system", "content": head.format(**slots)},
            {"role": "user", "content": tail.format(**slots)},
        ]
    text = pattern.format(**slots)
    if rng.random() < 0.2:
        text = rng.choice(("Please ", "Could you ", "I want you to ", "Hi, ")) + text[0].lower() + text[1:]
    if rng.random() < 0.15:
        text = text.lower()
    return [{"role": "user", "content": text}]
