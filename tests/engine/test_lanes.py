"""Long texts beside the event loop: nobody waits for them who sends a short one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engine.loader import read_info
from engine.server.lanes import Lanes
from engine.text.chat_template import CHATML, ChatTemplate
from engine.text.tokenizer import Tokenizer

SHORT, MEDIUM, LONG = 1000, 100_000, 10_000_000


@pytest_asyncio.fixture
async def lanes() -> AsyncIterator[Lanes]:
    lanes = Lanes(ChatTemplate(CHATML))
    yield lanes
    await lanes.stop()


async def test_short_and_medium_texts_pass_while_the_long_ones_wait_for_each_other(lanes: Lanes) -> None:
    release, started = threading.Event(), [threading.Event() for _ in range(3)]

    def work(number: int) -> int:
        started[number].set()
        assert release.wait(60)
        return number

    long = [asyncio.create_task(lanes.of(LONG).run(work, number)) for number in range(3)]
    await asyncio.to_thread(started[0].wait)
    for size in (SHORT, MEDIUM, SHORT):
        assert await lanes.of(size).run(str.upper, "x") == "X"
    assert [event.is_set() for event in started] == [True, False, False], "one at a time"
    release.set()
    assert await asyncio.gather(*long) == [0, 1, 2]


async def test_what_a_text_is_refused_for_reaches_its_request(lanes: Lanes) -> None:
    for size in (SHORT, MEDIUM, LONG):
        with pytest.raises(ValueError, match="invalid literal"):
            await lanes.of(size).run(int, "x")


async def test_a_long_conversation_has_a_template_process_of_its_own(lanes: Lanes) -> None:
    assert lanes.of(SHORT).renderer is lanes.of(MEDIUM).renderer
    assert lanes.of(SHORT).renderer is not lanes.of(LONG).renderer


@pytest.mark.parametrize("literals", [None, {"\U000f0000": "<|im_end|>"}])
def test_the_tokenizer_lets_other_threads_run(smollm2_path: Path, literals: dict[str, str] | None) -> None:
    tokenizer = Tokenizer(read_info(smollm2_path))
    ids: list[list[int]] = []
    thread = threading.Thread(target=lambda: ids.append(tokenizer.encode(" " * 500_000, literals=literals)))
    thread.start()
    turns = 0
    while not ids:
        turns += 1  # a thread that kept the interpreter lock would let this one turn a few times
    thread.join()
    assert turns > 10_000
    thread = threading.Thread(target=lambda: ids.append([len(tokenizer.decode(ids[0] * 5))]))
    thread.start()
    turns = 0
    while len(ids) < 2:
        turns += 1
    thread.join()
    assert turns > 10_000
    assert ids[1] == [500_000 * 5]


@pytest.mark.parametrize("text", [" " * 5000, "ab\n" * 2000, "#" * 5000, "=" * 5000, "\t" * 5000, "🙂" * 2000])
def test_no_text_has_more_characters_than_its_tokens_can_stand_for(smollm2_path: Path, text: str) -> None:
    tokenizer = Tokenizer(read_info(smollm2_path))
    assert tokenizer.longest_token == 81
    assert len(text) <= len(tokenizer.encode(text)) * tokenizer.longest_token
