"""Renders the chat template in a process of its own, within bounds of time and memory that the kernel enforces.

`renderer.py` starts it (`bounded_process.py` says how). A template that takes too much processor time for one
conversation is killed, one that takes too much memory gets a MemoryError; both end that conversation and no other.
Imports neither torch nor a tokenizer, so it starts fast and stays small.
"""

from __future__ import annotations

import sys

import msgspec

from engine.bounded_process import answer_all
from engine.messages import Conversation, Rendered, Template
from engine.text.chat_template import ChatTemplate, ChatTemplateError


class _Renderings:
    """Answers a `Template` and then conversations."""

    def __init__(self) -> None:
        self._template: ChatTemplate | None = None

    def __call__(self, payload: bytes) -> Rendered:
        try:
            if self._template is None:
                self._template = _compile(msgspec.msgpack.decode(payload, type=Template))
                return Rendered()
            return _render(self._template, msgspec.msgpack.decode(payload, type=Conversation))
        except ChatTemplateError as error:
            return Rendered(error=str(error))
        except MemoryError:
            return Rendered(error="the model's chat template takes too much memory with these messages")
        except Exception as error:  # whatever a strange template may raise
            return Rendered(error=f"the model's chat template fails: {type(error).__name__}: {error}")


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


if __name__ == "__main__":
    sys.exit(answer_all(sys.argv[1:], _Renderings()))
