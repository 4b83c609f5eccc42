"""The asyncio side of the chat template: starts the process that renders it, and another where that one was killed.

It promises: a conversation is rendered or refused, whatever the template does; nothing that it does holds up the event
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys

import msgspec

from engine.chat_template import ChatTemplate, ChatTemplateError
from engine.messages import Conversation, FrameReader, Rendered, Template, encode_frame

log = logging.getLogger("engine.renderer")

CPU_SECONDS = 3  # thousands of messages take a tenth of a second
_RECEIVE_BYTES = 1 << 18
_END_SECONDS = 5.0  # a process that has closed its connection ends within


class RenderedTooLong(Exception):
    """The text has more characters than the prompt may have."""

    def __init__(self, characters: int) -> None:
        super().__init__(f"{characters} characters")
        self.characters = characters


class _ProcessEnded(Exception):
    """In mid-sentence."""


class Renderer:
    """One process, started with the first conversation; conversations wait for each other."""

    def __init__(self, template: ChatTemplate, *, cpu_seconds: int = CPU_SECONDS) -> None:
        """`cpu_seconds`: what one conversation may take, rounded up to the next second of the process."""
        self._cpu_seconds = cpu_seconds
        with_tools = template.tool_template
        self._template = Template(
            template.source,
            template.bos_token,
            template.eos_token,
            None if with_tools is None else with_tools.source,
        )
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._killed: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        """Have the process up and the template compiled.

        Raises:
            ChatTemplateError: it cannot be compiled.
        """
        async with self._lock:
            await self._connected()

    async def render(self, conversation: Conversation) -> str:
        """The text of a conversation.

        Raises:
            ChatTemplateError: the template refuses it, or does not come to an end with it.
            RenderedTooLong: it has more characters than the conversation allows.
        """
        frame = encode_frame(conversation)
        async with self._lock:
            try:
                rendered = await self._exchange(await self._connected(), frame)
            except _ProcessEnded:
                if await self._ended() == -signal.SIGXCPU:
                    log.warning("the chat template was stopped after %d s of processor time", self._cpu_seconds)
                    raise ChatTemplateError(
                        "the model's chat template does not come to an end with these messages in "
                        f"{self._cpu_seconds} s of processor time: shorten the conversation, or serve a model with "
                        "another template"
                    ) from None
                # Somebody else ended it, perhaps long ago: that says nothing about this conversation.
                try:
                    rendered = await self._exchange(await self._connected(), frame)
                except _ProcessEnded:
                    code = await self._ended()
                    raise ChatTemplateError(f"the model's chat template ended its process, with code {code}") from None
        if rendered.error is not None:
            raise ChatTemplateError(rendered.error)
        if rendered.too_long is not None:
            raise RenderedTooLong(rendered.too_long)
        return rendered.text

    async def stop(self) -> None:
        """End the process."""
        self._drop()
        await self._reap()

    async def _connected(self) -> socket.socket:
        if self._socket is not None:
            return self._socket
        await self._reap()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "engine.template_process",
                str(theirs.fileno()),
                str(os.getpid()),
                str(self._cpu_seconds),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        ours.setblocking(False)
        self._socket = ours
        try:
            rendered = await self._exchange(ours, encode_frame(self._template))
        except _ProcessEnded:
            code = await self._ended()
            raise ChatTemplateError(
                f"the model's chat template cannot be compiled: that ends with code {code}"
            ) from None
        if rendered.error is not None:
            self._drop()
            raise ChatTemplateError(rendered.error)
        return ours

    async def _exchange(self, connection: socket.socket, frame: bytes) -> Rendered:
        loop = asyncio.get_running_loop()
        frames = FrameReader()
        try:
            await loop.sock_sendall(connection, frame)
            while data := await loop.sock_recv(connection, _RECEIVE_BYTES):
                for payload in frames.feed(data):
                    return msgspec.msgpack.decode(payload, type=Rendered)
        except (BrokenPipeError, ConnectionResetError):
            pass
        except asyncio.CancelledError:
            self._drop()  # its answer would be taken for the next one's
            raise
        raise _ProcessEnded

    async def _ended(self) -> int | None:
        """Wait for the end of a process that has closed its connection; returns its exit code."""
        process, connection = self._process, self._socket
        self._process = self._socket = None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        self._killed.append(process)
        # Not killed first: a signal to a process that has just ended would take its exit code away from who waits here.
        try:
            return await asyncio.wait_for(process.wait(), _END_SECONDS)
        except TimeoutError:
            process.kill()
            return await process.wait()

    def _drop(self) -> None:
        """Kill the process if it still runs; the next conversation starts another."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._killed.append(self._process)
        self._process = self._socket = None

    async def _reap(self) -> None:
        while self._killed:
            await self._killed[-1].wait()
            self._killed.pop()
