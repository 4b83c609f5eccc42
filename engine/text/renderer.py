"""The asyncio side of the chat template: a process that renders it, within bounds.

It promises: a conversation is rendered or refused, whatever the template does; nothing that it does holds up the event
loop.
"""

from __future__ import annotations

import logging

import msgspec

from engine.bounded_process import BoundedProcess, Ended, OutOfTime
from engine.messages import Conversation, Rendered, Template
from engine.text.chat_template import ChatTemplate, ChatTemplateError

log = logging.getLogger("engine.text.renderer")

CPU_SECONDS = 3  # thousands of messages take a tenth of a second


class RenderedTooLong(Exception):
    """The text has more characters than the prompt may have."""

    def __init__(self, characters: int) -> None:
        super().__init__(f"{characters} characters")
        self.characters = characters


class Renderer:
    """One process, started with the first conversation; conversations wait for each other."""

    def __init__(self, template: ChatTemplate, *, cpu_seconds: int = CPU_SECONDS) -> None:
        """`cpu_seconds`: what one conversation may take, rounded up to the next second of the process."""
        with_tools = template.tool_template
        self._template = Template(
            template.source,
            template.bos_token,
            template.eos_token,
            None if with_tools is None else with_tools.source,
        )
        self._process = BoundedProcess(
            "engine.text.template_process", cpu_seconds, self._greeting, lambda answer: _refuse(_decode(answer))
        )

    async def start(self) -> None:
        """Have the process up and the template compiled.

        Raises:
            ChatTemplateError: it cannot be compiled.
        """
        try:
            await self._process.start()
        except Ended as end:
            raise _end(end) from None

    async def render(self, conversation: Conversation) -> str:
        """The text of a conversation.

        Raises:
            ChatTemplateError: the template refuses it, or does not come to an end with it.
            RenderedTooLong: it has more characters than the conversation allows.
        """
        try:
            rendered = _decode(await self._process.ask(conversation))
        except OutOfTime:
            seconds = self._process.cpu_seconds
            log.warning("the chat template was stopped after %d s of processor time", seconds)
            raise ChatTemplateError(
                f"the model's chat template does not come to an end with these messages in {seconds} s of processor "
                "time: shorten the conversation, or serve a model with another template"
            ) from None
        except Ended as end:
            raise _end(end) from None
        _refuse(rendered)
        if rendered.too_long is not None:
            raise RenderedTooLong(rendered.too_long)
        return rendered.text

    async def _greeting(self) -> Template:
        return self._template

    async def stop(self) -> None:
        """End the process."""
        await self._process.stop()


def _decode(answer: bytes) -> Rendered:
    return msgspec.msgpack.decode(answer, type=Rendered)


def _refuse(rendered: Rendered) -> None:
    if rendered.error is not None:
        raise ChatTemplateError(rendered.error)


def _end(end: Ended) -> ChatTemplateError:
    if end.greeted:
        return ChatTemplateError(f"the model's chat template ended its process, with code {end.code}")
    return ChatTemplateError(f"the model's chat template cannot be compiled: that ends with code {end.code}")
