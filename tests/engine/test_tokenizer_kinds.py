"""Every kind of tokenizer: ids as the library's, SentencePiece's by its own rule, and the text comes back unharmed."""

from __future__ import annotations

import dataclasses
import json
import random
import unicodedata
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models

from engine.loader import ModelFileError, ModelInfo, TokenizerData, read_info
from engine.loader.folder import Folder
from engine.loader.hf_tokenizer import read_tokenizer
from engine.loader.info import BYTE, CONTROL, NORMAL, USER_DEFINED
from engine.text.detokenizer import Delta, Detokenizer
from engine.text.tokenizer import Tokenizer
from engine.types import FinishReason
from tests.engine.tokenizer_kinds import (
    BOS,
    END,
    EOS,
    FOLDERS,
    TEXTS,
    gguf_byte_level,
    gguf_sentencepiece,
    write_folder,
)

GGUF = ("gguf bytes", "gguf space always", "gguf space never", "gguf phi3")


@pytest.fixture(scope="module")
def info(smollm2_path: Path) -> ModelInfo:
    return read_info(smollm2_path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizers")
    for kind in FOLDERS:
        write_folder(root / kind, kind)
    return root


def data_of(kind: str, folders: Path) -> TokenizerData:
    if kind == "gguf bytes":
        return gguf_byte_level("llama-bpe", library(folders / "byte level"))
    if kind in GGUF:
        return gguf_sentencepiece(space_prefix=kind != "gguf space never", strip_after_control=kind == "gguf phi3")
    return read_tokenizer(Folder(folders / kind), {}, 10_000)


def library(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def all_kinds(info: ModelInfo, folders: Path) -> dict[str, Tokenizer]:
    return {kind: Tokenizer(dataclasses.replace(info, tokenizer=data_of(kind, folders))) for kind in (*FOLDERS, *GGUF)}


KINDS = pytest.mark.parametrize("kind", [*FOLDERS, *GGUF])


@pytest.mark.parametrize("kind", FOLDERS)
def test_ids_and_text_equal_transformers(kind: str, folders: Path, all_kinds: dict[str, Tokenizer]) -> None:
    ours = all_kinds[kind]
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folders / kind / "tokenizer.json"), bos_token=BOS, eos_token=EOS
    )
    for text in [*TEXTS, f"{BOS}user\n Hi{END}\n\n {BOS} there{END}"]:
        ids = reference.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special=False) == ids, text
        if text and not text.startswith(BOS):
            assert ours.encode(text) == reference.encode(text), text
        for skip in (False, True):
            assert ours.decode(ids, skip_special=skip) == reference.decode(ids, skip_special_tokens=skip), text


def test_gguf_bytes_equal_the_folder_of_the_same_vocabulary(all_kinds: dict[str, Tokenizer]) -> None:
    for text in TEXTS:
        assert all_kinds["gguf bytes"].encode(text) == all_kinds["byte level"].encode(text), text


def sentencepiece(data: TokenizerData, text: str) -> list[int]:
    """SentencePiece's BPE by its definition, one step at a time; user-defined pieces first, the longest that fits."""
    text = text.replace(" ", "▁")
    spelled = [token.replace(" ", "▁") for token in data.tokens]
    ids = {token: i for i, token in enumerate(spelled)}
    fixed = sorted((spelled[i] for i, kind in enumerate(data.types) if kind == USER_DEFINED), key=len, reverse=True)
    stretches: list[tuple[str, bool]] = []
    at = start = 0
    while at < len(text):
        if found := next((token for token in fixed if text.startswith(token, at)), None):
            stretches += [(text[start:at], False), (found, True)]
            at = start = at + len(found)
        else:
            at += 1
    stretches.append((text[start:], False))
    result: list[int] = []
    for stretch, whole in stretches:
        pieces = [stretch] if whole else list(stretch)
        while True:
            pairs = [
                (-data.scores[ids[a + b]], i)
                for i, (a, b) in enumerate(pairwise(pieces))
                if a + b in ids and data.types[ids[a + b]] == NORMAL
            ]
            if not pairs:
                break
            _, i = min(pairs)
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        for piece in pieces:
            known = piece in ids and (whole or data.types[ids[piece]] == NORMAL)
            result += [ids[piece]] if known else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return result


@pytest.mark.parametrize("seed", range(3))
def test_gguf_sentencepiece_equals_its_definition(seed: int, info: ModelInfo) -> None:
    data = gguf_sentencepiece(space_prefix=False, seed=seed)
    tokenizer = Tokenizer(dataclasses.replace(info, tokenizer=data))
    for text in TEXTS:
        if "   " in text or "<think>" in text:  # long runs and names: matched before anything, where spaces are joined
            continue
        assert tokenizer.encode(text, add_special=False) == sentencepiece(data, text), text


@KINDS
def test_every_text_comes_back(kind: str, all_kinds: dict[str, Tokenizer]) -> None:
    tokenizer = all_kinds[kind]
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special=False)
        if kind == "composed":
            text = unicodedata.normalize("NFC", text)
        if kind in ("space first", "unigram"):  # the library takes a space that is there for the one it would add
            text = text.removeprefix(" ")
        if "<think>" in text and (kind == "unigram" or tokenizer.opens_with_space([tokenizer.eos_id or 0])):
            continue  # the library puts a space behind user-defined tokens as well, and reads <0x0A> as that byte
        assert tokenizer.decode(ids) == text
        spelled = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert (spelled.removeprefix(" ") if tokenizer.opens_with_space([]) else spelled) == text


@KINDS
def test_a_text_begins_with_one_bos(kind: str, all_kinds: dict[str, Tokenizer]) -> None:
    tokenizer = all_kinds[kind]
    bos = tokenizer.bos_id
    assert bos is not None
    for text in ("hi", f"{BOS}hi", ""):
        ids = tokenizer.encode(text)
        assert ids.count(bos) == 1
        assert ids[0] == bos
    assert bos not in tokenizer.encode("hi", add_special=False)


@KINDS
def test_names_of_control_tokens_are_text_where_they_are_not_meant(kind: str, all_kinds: dict[str, Tokenizer]) -> None:
    tokenizer = all_kinds[kind]
    for name in (BOS, EOS, END):
        text = f"a {name}b{name}"
        meant, literal = tokenizer.encode(text, add_special=False), None
        literal = tokenizer.encode(text, add_special=False, parse_special=False)
        assert tokenizer.special_ids.intersection(meant)
        assert tokenizer.special_ids.isdisjoint(literal)
        assert tokenizer.decode(literal) == text
        mixed = tokenizer.encode(f"{END}\ua000x{END}", add_special=False, literals={"\ua000": name})
        assert mixed.count(next(iter(tokenizer.encode(END, add_special=False)))) == 2
        assert tokenizer.decode(mixed).lstrip(" ") == f"{name}x"


@KINDS
def test_stretches_between_control_tokens_are_read_as_the_whole_text_is(
    kind: str, all_kinds: dict[str, Tokenizer]
) -> None:
    tokenizer = all_kinds[kind]
    for text in TEXTS:
        whole = f"{BOS}{text}{END}\n {text}{EOS}"
        # A stand-in that does not occur makes each stretch be read alone.
        assert tokenizer.encode(whole, literals={"\ua000": "x"}) == tokenizer.encode(whole), text
        assert tokenizer.encode(text + END, literals={"\ua000": "x"}) == tokenizer.encode(text + END), text


@pytest.mark.parametrize("whole_words", [False, True])
def test_a_vocabulary_that_spells_a_control_token_itself_cannot_be_tricked(info: ModelInfo, whole_words: bool) -> None:
    """A word of the text can be in the vocabulary as it stands, or be joined from its letters by merges."""
    letters = [*"<|end>aĠ"]
    pre = "llama-bpe" if whole_words else "gpt-2"
    data = TokenizerData(
        model="gpt2", pre=pre, tokens=[*letters, "en", "<|", "<|end|>", "|>", "end"],
        types=[NORMAL] * (len(letters) + 2) + [CONTROL] + [NORMAL] * 2,
        merges=["e n", "< |", "en d", "| >"], bos_id=None, eos_id=letters.index("a"), eot_id=None, add_bos=False,
    )  # fmt: skip
    tokenizer = Tokenizer(dataclasses.replace(info, tokenizer=data))
    control = data.tokens.index("<|end|>")
    assert control in tokenizer.encode("a<|end|>")
    literal = tokenizer.encode("a<|end|>", parse_special=False)
    assert control not in literal
    assert tokenizer.decode(literal) == "a<|end|>"


def test_a_unigram_vocabulary_that_holds_control_tokens_cannot_be_tricked(
    info: ModelInfo, folders: Path, tmp_path: Path
) -> None:
    content = json.loads((folders / "unigram" / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    ids = {token["content"]: token for token in content["added_tokens"]}
    ids[END]["id"] = len(vocabulary)
    vocabulary.append([END, 0.0])  # likelier than any other way of reading it
    content["added_tokens"] = [ids["<unk>"], ids[END]]
    content["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(dataclasses.replace(info, tokenizer=read_tokenizer(Folder(tmp_path), {}, 10_000)))
    control = len(vocabulary) - 1
    assert tokenizer.encode(f"a{END}").count(control) == 1
    literal = tokenizer.encode(f"a{END}", parse_special=False)
    assert control not in literal
    assert tokenizer.decode(literal) == f"a{END}"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-4o", "fooBar HTTPServer I'VE 20261", ["foo", "Bar", " HTTPServer", " I'VE", " ", "202", "61"]),
        ("gpt-4o", "a//\n\nb?!", ["a", "//\n\n", "b", "?!"]),
        ("tekken", "fooBar I'VE 2026", ["foo", "Bar", " I", "'VE", " ", "2", "0", "2", "6"]),
        ("dbrx", "in 2026, I'VE", ["in", " ", "202", "6", ",", " I", "'VE"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(info: ModelInfo, pre: str, text: str, pieces: list[str]) -> None:
    raw = Tokenizer(dataclasses.replace(info, tokenizer=dataclasses.replace(info.tokenizer, pre=pre))).raw
    found = [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in raw.pre_tokenizer.pre_tokenize_str(text)]
    assert found == pieces


def test_settings_say_what_is_put_around_a_text(info: ModelInfo, tmp_path: Path) -> None:
    cases = {
        "plain": ({}, True, False),
        "neither": ({"add_bos_token": False}, False, False),
        "both": ({"add_eos_token": True}, True, True),
    }
    for name, (settings, begins, ends) in cases.items():
        write_folder(tmp_path / name, "byte level", settings=settings)
        data = read_tokenizer(Folder(tmp_path / name), {}, 10_000)
        ids = Tokenizer(dataclasses.replace(info, tokenizer=data)).encode("hi")
        assert (ids[0] == data.bos_id, ids[-1] == data.eos_id) == (begins, ends), name


def test_end_tokens_come_from_the_generation_config(folders: Path, tmp_path: Path) -> None:
    write_folder(tmp_path, "byte level")
    assert read_tokenizer(Folder(tmp_path), {"eos_token_id": 7}, 10_000).end_ids == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6, 999999]}')
    assert read_tokenizer(Folder(tmp_path), {"eos_token_id": 7}, 10_000).end_ids == {5, 6}


def test_tokens_that_the_model_has_no_place_for_are_text(info: ModelInfo, tmp_path: Path) -> None:
    library = write_folder(tmp_path, "space never")
    size = library.token_to_id("</think>")  # the last one
    tokenizer = Tokenizer(dataclasses.replace(info, tokenizer=read_tokenizer(Folder(tmp_path), {}, size)))
    ids = tokenizer.encode("a</think>b<think>")
    assert max(ids) == size - 1
    assert tokenizer.decode(ids) == "a</think>b<think>"


def test_types_are_found_in_a_folder(folders: Path) -> None:
    data = read_tokenizer(Folder(folders / "space first"), {}, 10_000)
    kinds = dict(zip(data.tokens, data.types, strict=True))
    assert (kinds["<0x0A>"], kinds[END], kinds["<think>"], kinds["▁the"]) == (BYTE, CONTROL, USER_DEFINED, NORMAL)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (None, "no such file, and the tokenizer is in it"),
        ("", "JSON is damaged"),
        ("{}", "damaged: KeyError"),
        ("[]", "is no object"),
        ("version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
        ('{"model": {"vocab": {"a": -1}}}', "has the id -1"),
    ],
)
def test_damaged_folders_are_named(damage: str | None, message: str, tmp_path: Path) -> None:
    if damage is not None:
        (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(ModelFileError, match=message) as caught:
        read_tokenizer(Folder(tmp_path), {}, 100)
    assert caught.value.path.name == "tokenizer.json"


def test_kinds_that_cannot_be_streamed_are_refused(info: ModelInfo, tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelFileError, match="decoder 'WordPiece' is not supported"):
        Tokenizer(dataclasses.replace(info, tokenizer=read_tokenizer(Folder(tmp_path), {}, 100)))


def streamed(tokenizer: Tokenizer, ids: list[int], sizes: list[int], **options: Any) -> list[Delta]:
    """The deltas of `ids` pushed in groups of `sizes`, over and over."""
    detokenizer = Detokenizer(tokenizer, opens_with_space=tokenizer.opens_with_space([]), **options)
    deltas: list[Delta] = []
    at = 0
    for size in cycle(sizes):
        group = ids[at : at + size]
        at += size
        deltas.append(detokenizer.push(group, finish_reason=FinishReason.LENGTH if at >= len(ids) else None))
        if detokenizer.is_finished:
            return deltas
    raise AssertionError("unreachable")


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@KINDS
def test_a_stream_is_the_text_of_all_its_tokens(kind: str, all_kinds: dict[str, Tokenizer]) -> None:
    tokenizer = all_kinds[kind]
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special=False)
        for sizes in ([1], [2], [1, 3, 7]):
            deltas = streamed(tokenizer, ids, sizes)
            assert text_of(deltas) == tokenizer.decode(ids), text
            assert not any("\ufffd" in delta.text for delta in deltas), "no character is split"
            assert [i for delta in deltas for i in delta.token_ids] == ids


@KINDS
def test_any_tokens_whatever_stream_as_they_decode(kind: str, all_kinds: dict[str, Tokenizer]) -> None:
    tokenizer = all_kinds[kind]
    chosen = random.Random(kind)
    for _ in range(200):
        ids = chosen.choices(range(tokenizer.vocab_size), k=chosen.randint(1, 12))  # broken characters among them
        skip = chosen.random() < 0.5
        assert text_of(streamed(tokenizer, ids, [chosen.randint(1, 3)], skip_special=skip)) == tokenizer.decode(
            ids, skip_special=skip
        )


@KINDS
def test_ids_that_pad_the_model_stand_for_nothing(kind: str, all_kinds: dict[str, Tokenizer]) -> None:
    tokenizer = all_kinds[kind]
    ids = tokenizer.encode("the cat", add_special=False)
    padded = [tokenizer.vocab_size, *ids, tokenizer.vocab_size + 63]
    assert text_of(streamed(tokenizer, padded, [1])) == "the cat"
    with pytest.raises(ValueError, match="outside the vocabulary"):
        tokenizer.decode(padded)


@KINDS
def test_stop_strings_cut_at_every_alignment(kind: str, all_kinds: dict[str, Tokenizer]) -> None:
    tokenizer = all_kinds[kind]
    for text in (t for t in TEXTS if 5 < len(t) < 60):
        ids = tokenizer.encode(text, add_special=False)
        whole = tokenizer.decode(ids)
        for start in range(0, len(whole) - 2, 3):
            stop = whole[start : start + 3]
            assert text_of(streamed(tokenizer, ids, [1], stop=[stop])) == whole[: whole.find(stop)]
        counted = streamed(tokenizer, ids, [1], stop=[whole[-1:]], min_tokens=len(ids))
        assert sum(len(delta.token_ids) for delta in counted) == len(ids), "nothing stops before min_tokens"


def test_a_space_belongs_to_the_model_only_where_it_would_put_one(all_kinds: dict[str, Tokenizer]) -> None:
    always, first, never = (all_kinds[kind] for kind in ("space always", "space first", "space never"))
    for tokenizer in (always, first, never):
        end = tokenizer.encode(END, add_special=False)
        letter = tokenizer.encode("a", add_special=False)
        assert tokenizer.opens_with_space([]) == (tokenizer is not never)
        assert tokenizer.opens_with_space(end) == (tokenizer is always)
        assert not tokenizer.opens_with_space([*end, *letter])
