"""Judges that need no model: what they call the same, and that in doubt they do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cache import judges
from cache.embedding.batcher import Batcher
from cache.embedding.embedder import Embedder
from cache.entry import Entry


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("Positive", " positive. ", True),
        ("It is\n  Paris.", "it is Paris", True),
        ("cafe\u0301", "café", True),
        ("5", "5!", False),
        ("Paris", "Lyon", False),
        ("1.", "1..", False),
        ("", "", True),
    ],
)
def test_equal(first: str, second: str, same: bool) -> None:
    assert judges.equal(first, second) is same
    assert judges.equal(second, first) is same


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (
            "Photosynthesis turns light into energy in plants.",
            "In plants, photosynthesis turns light into energy.",
            True,
        ),
        ("The service is available on Sundays.", "The service is not available on Sundays.", False),
        ("It takes 3 working days.", "It takes 5 working days.", False),
        ("The capital of France is Paris.", "The capital of France is Lyon.", False),
        ("Yes, the card is free.", "Bees make honey.", False),
        # Names, which guards for questions do not always see in longer texts.
        (
            "The museum opened late. Its founder lived in America until the war, and then moved to the coast.",
            "The museum opened late. Its founder lived in Portugal until the war, and then moved to the coast.",
            False,
        ),
        (
            "The museum opened late. Its founder lived in America until the war, and then moved to the coast.",
            "- The museum opened late.\n- Its founder lived in America until the war, and then moved to the coast.",
            True,
        ),
    ],
)
async def test_alike(embedder: Embedder, first: str, second: str, same: bool) -> None:
    batcher = Batcher(embedder, max_batch_size=8, max_wait_ms=0)
    batcher.start()
    assert await judges.alike(first, second, batcher) is same
    await batcher.close()


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("We met in Rome and Paris.", "We met in Paris and Rome.", True),
        ("We met in Rome.", "We met in Rome. Ask Anna.", False),  # in doubt: different
        ("Take the A train, then I will call.", "Take the A train. Then I will call.", True),  # one letter is no name
    ],
)
def test_same_words(first: str, second: str, same: bool) -> None:
    assert judges.same_words(first, second) is same
    assert judges.same_words(second, first) is same


async def test_what_the_embedder_cannot_read_has_no_verdict(embedder: Embedder) -> None:
    batcher = Batcher(embedder, max_batch_size=8, max_wait_ms=0)
    batcher.start()
    for text, reason in (("word " * 1000, "too_long"), ("如何开启深色模式", "script_not_covered")):
        with pytest.raises(judges.NoVerdict, match=reason):
            await judges.alike("Paris", text, batcher)
    await batcher.close()
    with pytest.raises(judges.NoVerdict, match="no_embedder"):
        await judges.alike("a", "b", None)


@pytest.mark.parametrize(
    "answer", [b"", b"{}", b'{"choices": []}', b'{"choices": [{"message": {"content": 5}}]}', b"\xff"]
)
def test_an_answer_that_cannot_be_read_has_no_verdict(make_entry: Callable[..., Entry], answer: bytes) -> None:
    with pytest.raises(judges.NoVerdict, match="unreadable"):
        judges.text_of(make_entry("q", answer))
