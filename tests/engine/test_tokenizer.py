"""The tokenizer from the model file: ids equal to transformers', special tokens only where they are meant."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from engine.loader import ModelFileError, ModelInfo, read_info
from engine.text.tokenizer import Tokenizer

REFERENCE = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and   inner  spaces \n\n\tand tabs\r\n",
    "I've they're we'll DON'T",
    "1234567890 3.14159 2026-11-29",
    "def f(x):\n    return x ** 2  # square\n",
    "naïve café Ünïcödé",
    "你好,世界。今天的天气怎么样?",
    "日本語のテキストと한국어 문장",
    "🙂🙃👩‍👩‍👧‍👦 flags 🇫🇷🇩🇪 and ☕️",
    "مرحبا بالعالم שלום",
    "\x00\x01 control \u200b zero width",
    "a" * 300,
]


@pytest.fixture(scope="module")
def info(smollm2_path: Path) -> ModelInfo:
    return read_info(smollm2_path)


@pytest.fixture(scope="module")
def tokenizer(info: ModelInfo) -> Tokenizer:
    return Tokenizer(info)


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: case["name"])
def test_reference_prompts(tokenizer: Tokenizer, case: dict[str, object]) -> None:
    assert tokenizer.encode(str(case["prompt"])) == case["prompt_ids"]
    assert tokenizer.decode(case["prompt_ids"], skip_special=False) == case["prompt"]  # type: ignore[arg-type]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


# transformers' GGUF conversion ignores that this model splits digits: the pre-tokenizer test and the reference prompts
# cover that.
@pytest.mark.parametrize("text", [text for text in TEXTS if not any(map(str.isdigit, text))])
def test_ids_equal_transformers(
    tokenizer: Tokenizer, reference: transformers.PreTrainedTokenizerBase, text: str
) -> None:
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False)


def test_special_tokens_are_read_only_when_asked(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [2]
    literal = tokenizer.encode("<|im_end|>", parse_special=False)
    assert 2 not in literal
    assert tokenizer.decode(literal) == "<|im_end|>"
    assert tokenizer.decode([81, 2]) == tokenizer.decode([81])
    assert tokenizer.decode([2], skip_special=False) == "<|im_end|>"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_end_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.end_ids == {0, 2}  # <|endoftext|>, <|im_end|>
    assert tokenizer.eos_id == 2


def test_bos_is_added_once(info: ModelInfo) -> None:
    with_bos = Tokenizer(dataclasses.replace(info, tokenizer=dataclasses.replace(info.tokenizer, add_bos=True)))
    assert with_bos.encode("hi") == [1, *Tokenizer(info).encode("hi")]
    assert with_bos.encode("<|im_start|>hi") == with_bos.encode("hi")  # the text brings its own
    assert with_bos.encode("hi", add_special=False) == Tokenizer(info).encode("hi")


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "in 2026, I've", ["in", " ", "2", "0", "2", "6", ",", " I", "'ve"]),
        ("gpt-2", "in 2026, I've", ["in", " 2026", ",", " I", "'ve"]),
        ("llama-bpe", "in 2026, I'VE", ["in", " ", "202", "6", ",", " I", "'VE"]),
        ("qwen2", "in 2026, I'VE", ["in", " ", "2", "0", "2", "6", ",", " I", "'VE"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(info: ModelInfo, pre: str, text: str, pieces: list[str]) -> None:
    raw = Tokenizer(dataclasses.replace(info, tokenizer=dataclasses.replace(info.tokenizer, pre=pre))).raw
    assert [piece.replace("Ġ", " ") for piece, _ in raw.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_unsupported_tokenizers_are_refused(info: ModelInfo) -> None:
    for change in ({"pre": "martian"}, {"model": "t5"}, {"merges": ["zz zzz"]}):
        broken = dataclasses.replace(info, tokenizer=dataclasses.replace(info.tokenizer, **change))
        with pytest.raises(ModelFileError, match="tokenizer"):
            Tokenizer(broken)


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    for bad in (-1, 49_152):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            tokenizer.decode([bad])


def test_no_torch(smollm2_path: Path) -> None:
    code = (
        "import sys; from engine.loader import read_info; from engine.text.tokenizer import Tokenizer; "
        "from engine.text.chat_template import ChatTemplate; "
        f"Tokenizer(read_info({str(smollm2_path)!r})).encode('hi'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
