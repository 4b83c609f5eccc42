"""Renders the chat template in a process of its own, within bounds of time and memory that the kernel enforces.

`python -m engine.template_process FD PARENT_PID CPU_SECONDS` is started by `renderer.py`. A template that takes more
processor time than that for one conversation kills it, one that takes more memory than `MEMORY_BYTES` gets a
MemoryError; both end that conversation and no other. Imports neither torch nor a tokenizer, so it starts fast and stays
small.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import sys

import msgspec

from engine.chat_template import ChatTemplate, ChatTemplateError
from engine.lifeline import die_with_parent
from engine.messages import Conversation, FrameReader, Rendered, Template, encode_frame

MEMORY_BYTES = 1 << 30
_RECEIVE_BYTES = 1 << 18


def serve(connection: socket.socket, cpu_seconds: int) -> None:
    """Answer a `Template` and then conversations, one after the other, until the other side closes."""
    frames = FrameReader()
    template: ChatTemplate | None = None
    while data := connection.recv(_RECEIVE_BYTES):
        for payload in frames.feed(data):
            _allow_cpu_seconds(cpu_seconds)
            try:
                if template is None:
                    template, answer = _compile(msgspec.msgpack.decode(payload, type=Template)), Rendered()
                else:
                    answer = _render(template, msgspec.msgpack.decode(payload, type=Conversation))
            except ChatTemplateError as error:
                answer = Rendered(error=str(error))
            except MemoryError:
                answer = Rendered(error="the model's chat template takes too much memory with these messages")
            except Exception as error:  # whatever a strange template may raise
                answer = Rendered(error=f"the model's chat template fails: {type(error).__name__}: {error}")
            connection.sendall(encode_frame(answer))


def _compile(asked: Template) -> ChatTemplate:
    template = ChatTemplate(
        asked.source, bos_token=asked.bos_token, eos_token=asked.eos_token, tool_source=asked.tool_source
    )
    template.compile()
    return template


def _render(template: ChatTemplate, asked: Conversation) -> Rendered:
    text = template.render(
        asked.messages,
        tools=asked.tools,
        documents=asked.documents,
        add_generation_prompt=asked.add_generation_prompt,
        variables=asked.variables,
    )
    return Rendered(text) if len(text) <= asked.most_characters else Rendered(too_long=len(text))


def _allow_cpu_seconds(seconds: int) -> None:
    """From now on; the signal of the limit ends the process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime) + 1 + seconds)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def main(arguments: list[str]) -> int:
    """Serve the inherited socket until it closes."""
    descriptor, parent_pid, cpu_seconds = arguments
    die_with_parent(int(parent_pid))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the HTTP process decides
    _limit(resource.RLIMIT_CORE, 0)
    with contextlib.suppress(ValueError, OSError):  # not every system has this one
        _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the HTTP process went away
        serve(socket.socket(fileno=int(descriptor)), int(cpu_seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
