"""Words that name a task: small hand-made word lists, one per family, counted where instructions stand.

A linear model over words cannot know that "Kotlin" is like "Java" if it saw only one of them; these lists tell it.
They are features of the classifier, not rules: their weights are learned like all others.
"""

from __future__ import annotations

from typing import Final

_LISTS: Final[dict[str, str]] = {
    "classify": """
        classify classifies classified classification categorise categorize category categories label labels
        labelled tag tags sentiment spam toxic toxicity offensive detect determine decide identify intent relevant
        irrelevant positive negative neutral duplicate duplicates satisfied genre genres rate rating true false
        whether yes choose pick select belongs urgent urgency severity priority grade judge screen mark stars
        polarity ham triage route flag
    """,
    "extract": """
        extract extracts extracted extraction pull find retrieve parse entities entity fields field names dates
        mentioned mention mentions appear appears json csv structured attributes attribute values listed gather
        quote sentences phone address emails amounts invoice receipt
    """,
    "summarise": """
        summarise summarize summarised summarized summary summaries summarization tldr tl dr condense recap sum
        minutes outline brief briefly gist shorten overview takeaways takeaway bullet abstract digest synopsis
        essence boil main
    """,
    "rewrite": """
        rewrite rewrites rewritten rephrase paraphrase reword correct corrected grammar grammatical spelling
        punctuation proofread polish improve edit revise tone formal formally casual concise clearer polite
        professional professionally simplify shorter wording fluent anonymise anonymize replace convert transform
        capitalise capitalize typos errors style academic
    """,
    "translate": """
        translate translated translation translator french german spanish italian portuguese dutch polish chinese
        mandarin cantonese japanese korean arabic hindi russian turkish swedish greek czech vietnamese danish
        norwegian finnish hungarian romanian ukrainian hebrew thai indonesian latin urdu bengali swahili persian
        english localise localize
    """,
    "chat": """
        hi hello hey thanks thank goodbye bye morning evening night chat talk feel feeling feelings lonely bored sad
        happy joke jokes lol haha please sorry my me i'm you your
    """,
    "write": """
        write compose draft email letter essay story poem haiku song lyrics blog post article tweet caption speech
        review description headline advertisement ad slogan invitation announcement newsletter script scene dialogue
        dialog monologue cover bio biography report proposal statement memo reply respond introduction paragraph
        novel limerick sonnet fable product character
    """,
    "ideas": """
        brainstorm ideas idea suggest suggestions suggestion recommend recommendations list lists names options tips
        topics questions alternatives synonyms antonyms rhyme rhymes examples ways gifts activities hobbies plan
        itinerary checklist menu recipes dinner snacks titles hashtags playlist books movies think come propose
    """,
    "code": """
        python java javascript typescript rust go golang kotlin swift ruby php perl scala haskell ocaml scheme lisp
        clojure matlab octave julia sql mysql postgres postgresql sqlite mongodb redis bash shell powershell awk sed
        regex html css json yaml xml react vue angular svelte nextjs node nodejs express django flask fastapi spring
        laravel symfony wordpress rails dotnet asp unity unreal godot roblox lua luau c++ cpp csharp c# vba excel
        pandas numpy scipy matplotlib seaborn sklearn scikit keras tensorflow pytorch jax gradio streamlit opencv
        docker kubernetes k8s terraform ansible jenkins nginx apache linux ubuntu debian nix nixos git github gitlab
        aws azure gcp lambda api rest graphql grpc http https oauth jwt cors endpoint backend frontend database
        schema query queries code codes coding program programs programming programmer function functions class
        method script scripts algorithm compile compiler debug bug bugs error errors exception stacktrace refactor
        unit test tests async thread threads pointer array arrays string strings loop recursion snippet variable
        variables library package module plugin app application server client socket deploy config configuration
        implement implementation glsl shader cuda gpu verilog vhdl assembly x86 arm arduino raspberry kernel driver
        android ios selenium beautifulsoup scrape scraper crawler webhook websocket dataframe csv cron ffmpeg qt
        tkinter solidity
    """,
    "maths": """
        solve equation equations calculate compute sum product average percent percentage probability integer
        integers prime triangle circle radius area volume perimeter polynomial root roots derivative integral matrix
        vector prove proof theorem fraction ratio remainder digits divisible factorial logarithm sine cosine angle
        degrees total cost each twice half times minus plus how many much per hours miles dollars interest factor
        simplify evaluate value values
    """,
    "reason": """
        analyse analyze analysis evaluate assess compare weigh trade-offs tradeoffs strategy strategic strategies
        risks risk recommend recommendation justify argue argument critique assumptions diagnose diagnosis plan
        roadmap design architect architecture scenario implications consequences optimise optimize decide decision
        hypothesis deduce logic logical puzzle riddle clues constraints constraint reasoning estimate forecast
        business market patient legal law tax investment policy consultant expert
    """,
    "facts": """
        who when where which what year name capital president invented wrote born died located country city played
        won sang founded discovered largest longest highest first meaning population currency film movie actor
        author team season album
    """,
    "science": """
        atom atoms molecule electron energy force velocity mass temperature pressure reaction acid cell cells
        protein gene genes dna enzyme species planet gravity wavelength equilibrium voltage current resistance
        quantum spin orbital enthalpy entropy capacitor isotope mol molar spectrum hydrogen oxygen carbon plaintiff
        defendant contract statute jurisdiction theory philosopher economy demand supply following statement
        statements
    """,
}

FAMILIES: Final = tuple(_LISTS)
_FAMILY_OF: Final[dict[str, tuple[int, ...]]] = {}
for _i, _words in enumerate(_LISTS.values()):
    for _word in dict.fromkeys(_words.split()):
        _FAMILY_OF[_word] = (*_FAMILY_OF.get(_word, ()), _i)


def counts(words: list[str]) -> list[int]:
    """Number of distinct words of each family, in the order of `FAMILIES`."""
    found = [0] * len(FAMILIES)
    for word in dict.fromkeys(words):
        for family in _FAMILY_OF.get(word, ()):
            found[family] += 1
    return found
