"""Small tokenizers of every kind, trained here, as files: folders with a `tokenizer.json`, and GGUF's tables."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from engine.loader.info import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, TokenizerData

TEXTS = [
    "",
    " ",
    "   ",
    "Hello, world!",
    "  leading and   inner  spaces \n\n\tand tabs\r\n",
    "I've they're we'll DON'T",
    "1234567890 3.14159 2026-11-29 ½ ² ٣٤٥",
    "def f(x):\n    return x ** 2  # square\n\n\n\nclass HTTPServer:\n\tpass\n",
    "naïve café Ünïcödé, e\u0301\u0323 combining a\u0310",
    "你好,世界。今天的天气怎么样?",
    "日本語のテキストと한국어 문장 \u1112\u1161\u11ab",
    "🙂🙃👩‍👩‍👧‍👦 flags 🇫🇷🇩🇪 and ☕️",
    "مرحبا بالعالم שלום",
    "\x00\x01 control \u200b zero width \ufeff",
    "x\u00a0y\u2003z\u3000w 𝒳𝒴 ꧁༺",
    "<0x0A> <think>\nhm\n</think> a<think>b",
    "a" * 300,
]
_PIECES = [
    "the",
    " the ",
    "a",
    "Zé",
    "\n",
    "\t",
    "  ",
    "中",
    "😀",
    "'s",
    "\u200d",
    ".",
    "12",
    "<",
    "|",
    "_",
    "/",
    "\u0301",
]
_RANDOM = random.Random(7)
TEXTS += ["".join(_RANDOM.choices(_PIECES, k=_RANDOM.randint(1, 40))) for _ in range(40)]

_CORPUS = [
    "the cat sat on the mat and the dog barked at the moon  while it's raining",
    "def f(x):\n    return x + 1\n\n\nprint(f(41))",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
    "你好世界 こんにちは 안녕하세요 😀😀",
    "I've seen 1234 things, they've seen 5678 more than that; the theatre is there",
] * 4
BOS, EOS, END = "<s>", "</s>", "<|end|>"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Words as Llama 3's tokenizer.json cuts them.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FOLDERS = ("byte level", "composed", "space always", "space first", "space never", "unigram")


def write_folder(path: Path, kind: str, *, settings: dict[str, Any] | None = None) -> Tokenizer:
    """A folder with the tokenizer of a kind of `FOLDERS`; returns the library's own, for reference."""
    tokenizer = _byte_level(kind) if kind in ("byte level", "composed") else _sentencepiece(kind)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in (BOS, EOS)])
    # Phi-3's way: white space behind it belongs to it.
    tokenizer.add_special_tokens([AddedToken(END, normalized=False, rstrip=kind == "space always")])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    named = {"bos_token": BOS, "eos_token": {"content": EOS}} | (settings or {})
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    return Tokenizer.from_file(str(path / "tokenizer.json"))


def _byte_level(kind: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "composed":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=450, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def _sentencepiece(kind: str) -> Tokenizer:
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=500, special_tokens=["<unk>", *_BYTES], unk_token="<unk>", show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", *_BYTES], show_progress=False)
    space = decoders.Replace("▁", " ")
    parts = [space, decoders.ByteFallback(), decoders.Fuse()]
    if kind == "space never":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    elif kind == "space always":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=kind == "unigram")
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)
    training = Tokenizer(tokenizer.model)
    training.pre_tokenizer = pre_tokenizers.Metaspace()
    training.train_from_iterator(_CORPUS, trainer)
    state = json.loads(training.to_str())["model"] | {"byte_fallback": True}
    whole = json.loads(tokenizer.to_str()) | {"model": state}
    # Trained as special tokens for their ids; in the files of such models bytes are ordinary pieces.
    whole["added_tokens"] = [{"id": 0, "content": "<unk>", "special": True} | _PLAIN]
    return Tokenizer.from_str(json.dumps(whole))


_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def gguf_sentencepiece(*, space_prefix: bool, strip_after_control: bool = False, seed: int = 0) -> TokenizerData:
    """A vocabulary with scores of its own, as GGUF files of SentencePiece models hold it; letters of `TEXTS` in it."""
    chosen = random.Random(seed)
    letters = sorted({c for text in _CORPUS for c in text.replace(" ", "▁")} - {"\n"})
    words = {text.replace(" ", "▁")[i : i + n] for text in _CORPUS[:5] for i in range(len(text)) for n in (2, 3, 4)}
    words = {word for word in words if len(word) > 1 and "\n" not in word}
    pieces = chosen.sample(sorted(words), 200)
    # Gemma has runs of white space as tokens and puts no space before a text.
    runs = [] if space_prefix else ["  ", "   ", "    ", "\n", "\n\n"]
    tokens = ["<unk>", BOS, EOS, END, "<think>", "</think>", *runs, *_BYTES, *letters, *pieces]
    types = [UNKNOWN, *[CONTROL] * 3, *[USER_DEFINED] * (2 + len(runs)), *[BYTE] * 256]
    types += [NORMAL] * (len(tokens) - len(types))
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(rank) for rank in chosen.sample(range(1000), len(pieces))]
    return TokenizerData(
        model="llama", pre="default", tokens=tokens, types=types, merges=[], bos_id=1, eos_id=2, eot_id=3, add_bos=True,
        scores=scores, space_prefix=space_prefix, strip_after_control=strip_after_control,
    )  # fmt: skip


def gguf_byte_level(pre: str, tokenizer: Tokenizer) -> TokenizerData:
    """The vocabulary and merges of a byte-level `tokenizer` as a GGUF file holds them."""
    state = json.loads(tokenizer.to_str())
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in state["added_tokens"]}
    return TokenizerData(
        model="gpt2", pre=pre, tokens=tokens, types=[kinds.get(token, NORMAL) for token in tokens],
        merges=[" ".join(pair) for pair in state["model"]["merges"]], bos_id=ids[BOS], eos_id=ids[EOS], eot_id=None,
        add_bos=True,
    )  # fmt: skip
