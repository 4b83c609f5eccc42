"""The chat template in its own process: what it renders, and what becomes of templates that would never end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from engine.messages import Conversation
from engine.text.chat_template import CHATML, ChatTemplate, ChatTemplateError
from engine.text.renderer import RenderedTooLong, Renderer

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello 🙂"}]


def asked(messages: list[dict[str, Any]] = HELLO, most: int = 1000, **variables: Any) -> Conversation:
    return Conversation(messages, True, variables or None, most)


@asynccontextmanager
async def rendering(source: str) -> AsyncIterator[Renderer]:
    renderer = Renderer(ChatTemplate(source, bos_token="<s>", eos_token="</s>"), cpu_seconds=1)
    try:
        yield renderer
    finally:
        await renderer.stop()


def processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "engine.text.template_process" in child.cmdline()]


async def test_it_renders_as_in_this_process() -> None:
    for source in (CHATML, "{{ bos_token }}{{ messages[0].content }}{{ mood }}{{ eos_token }}"):
        here = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
        async with rendering(source) as renderer:
            for mood in ("glad", "sad"):
                assert await renderer.render(asked(mood=mood)) == here.render(HELLO, variables={"mood": mood})
    assert processes() == []


async def test_tools_and_documents_go_along() -> None:
    template = ChatTemplate("plain", tool_source="{{ tools[0].name }}{{ documents[0].text }}")
    renderer = Renderer(template)
    try:
        assert await renderer.render(asked()) == "plain"
        asking = Conversation(HELLO, True, None, 100, tools=[{"name": "f"}], documents=[{"text": "!"}])
        assert await renderer.render(asking) == "f!"
    finally:
        await renderer.stop()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (LOOP, "does not come to an end with these messages in 1 s"),
        ("{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(60) }}", "maximum recursion depth|end"),
        ("{{ (messages | length + 8) ** (9 ** (messages | length + 8)) }}", "does not come to an end|too much memory"),
        ("{{ 'x' * (messages | length * 10 ** 11) }}", "too much memory"),
        (
            "{% set s = namespace(x='x' * 1000) %}{% for i in range(40) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
            "too much memory|does not come to an end",
        ),
        ("{{ undefined_function() }}", "refuses these messages"),
    ],
)
async def test_what_would_never_end_is_refused_and_the_next_one_rendered(source: str, message: str) -> None:
    guarded = "{% if messages[0].content == 'attack' %}" + source + "{% endif %}{{ messages[0].content }}"
    async with rendering(guarded) as renderer:
        for _ in range(2):
            with pytest.raises(ChatTemplateError, match=message):
                await renderer.render(asked([{"role": "user", "content": "attack"}]))
            assert await renderer.render(asked()) == "Hello 🙂"
        assert len(processes()) <= 1


async def test_the_event_loop_goes_on_meanwhile() -> None:
    async with rendering(LOOP) as endless, rendering(CHATML) as other:
        attack = asyncio.create_task(endless.render(asked()))
        for _ in range(20):
            assert "Hello" in await other.render(asked())
        assert not attack.done()
        with pytest.raises(ChatTemplateError):
            await attack


@pytest.mark.parametrize("source", ["{{ 9 ** (9 ** (9 ** 9)) }}", "{{ x | no_such_filter }}"])
async def test_what_cannot_be_compiled_is_found_at_the_start(source: str) -> None:
    """Constant expressions are computed by the compiler."""
    async with rendering(source) as renderer:
        with pytest.raises(ChatTemplateError, match=r"compiled|broken"):
            await renderer.start()
    assert processes() == []


async def test_a_text_beyond_the_bound_stays_where_it_is() -> None:
    async with rendering("{{ 'x' * (messages | length) * 1001 }}") as renderer:
        with pytest.raises(RenderedTooLong) as raised:
            await renderer.render(asked())
        assert raised.value.characters == 1001
        assert len(await renderer.render(asked(most=1001))) == 1001


async def test_a_process_that_somebody_ends_is_replaced() -> None:
    async with rendering(CHATML) as renderer:
        before = await renderer.render(asked())
        [process] = processes()
        process.kill()
        assert await renderer.render(asked()) == before
        assert processes() != [process]


async def test_who_gives_up_waiting_does_not_leave_an_answer_for_the_next_one() -> None:
    async with rendering("{% if messages[0].content == 'attack' %}" + LOOP + "{% endif %}fine") as renderer:
        await renderer.start()
        attack = asyncio.create_task(renderer.render(asked([{"role": "user", "content": "attack"}])))
        await asyncio.sleep(0)
        attack.cancel()
        assert await renderer.render(asked()) == "fine"
        with pytest.raises(asyncio.CancelledError):
            await attack
