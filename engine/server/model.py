"""The served model as the HTTP side knows it: name, tokenizer, template. No weights, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.protocol import InvalidRequest, Json
from engine.chat_template import ChatTemplate
from engine.loader import read_info
from engine.server.errors import ApiError, unsupported
from engine.server.params import API_DEFAULTS, SamplingDefaults
from engine.server.schema import ChatExtras
from engine.tokenizer import Tokenizer
from engine.types import TokenLogprob

# JSON has no infinity; this is what OpenAI sends for an impossible token.
_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Model:
    """Everything that turns requests into token ids and answers into text."""

    name: str
    created: int
    tokenizer: Tokenizer
    template: ChatTemplate
    vocab_size: int
    sampling: SamplingDefaults = API_DEFAULTS

    @classmethod
    def load(cls, path: Path, name: str, sampling: SamplingDefaults = API_DEFAULTS) -> Model:
        """Read the model file's description. `sampling` counts where a request names no value.

        Raises:
            ModelFileError: the file cannot be served.
            ChatTemplateError: its chat template is broken.
        """
        info = read_info(path)
        tokens = info.tokenizer.tokens

        def text(token_id: int | None) -> str:
            return "" if token_id is None else tokens[token_id]

        template = ChatTemplate(
            info.chat_template, bos_token=text(info.tokenizer.bos_id), eos_token=text(info.tokenizer.eos_id)
        )
        return cls(name, int(path.stat().st_mtime), Tokenizer(info), template, info.spec.vocab_size, sampling)

    def check_name(self, requested: str) -> None:
        """Raises ApiError 404 if the request means another model."""
        if requested != self.name:
            raise ApiError(
                404,
                f"The model '{requested}' is not served here; this engine serves '{self.name}'.",
                code="model_not_found",
                param="model",
            )

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raises InvalidRequest if a token id is not in the vocabulary."""
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"'{param}' holds token id {token_id}; the vocabulary has {self.vocab_size} tokens.", param=param
                )

    def encode_chat(self, messages: list[Json], extras: ChatExtras) -> list[int]:
        """Token ids of a conversation, by the model's template.

        Raises:
            ChatTemplateError: the template refuses the messages.
            InvalidRequest: the fields of the prompt contradict each other.
        """
        if extras.continue_final_message:
            text = self._open_final_message(messages, extras)
        else:
            generate = extras.add_generation_prompt is not False
            text = self._render(messages, extras, generate=generate)
        # The template writes the beginning-of-sequence token itself if the model wants it.
        return self.tokenizer.encode(text, add_special=bool(extras.add_special_tokens))

    def _open_final_message(self, messages: list[Json], extras: ChatExtras) -> str:
        """The prompt up to the end of the last message's text, for the model to go on from there."""
        param = "continue_final_message"
        if extras.add_generation_prompt:
            raise InvalidRequest(f"'{param}' and 'add_generation_prompt' exclude each other.", param=param)
        last = messages[-1]
        content = last.get("content")
        if last.get("role") != "assistant" or not isinstance(content, str) or not content.strip():
            raise InvalidRequest(f"'{param}' needs a last message of the assistant with some text.", param=param)
        text = self._render(messages, extras, generate=False)
        # Templates may strip the message, so its stripped form is looked for.
        start = text.rfind(content.strip())
        if start < 0:
            raise unsupported(param, "The model's template changes the text of messages.")
        return text[: start + len(content.strip())]

    def _render(self, messages: list[Json], extras: ChatExtras, *, generate: bool) -> str:
        # OpenAI's newer name for the system role; templates know the older one.
        renamed = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
        return self.template.render(renamed, add_generation_prompt=generate, variables=extras.chat_template_kwargs)

    def token_text(self, token_id: int) -> str:
        """One token as text; bytes that are no whole character become U+FFFD."""
        return self._bytes(token_id).decode("utf-8", errors="replace")

    def chat_logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """OpenAI's `logprobs` object of a chat choice."""
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._bytes(token_id)
        return {
            "token": data.decode("utf-8", errors="replace"),
            "logprob": finite(logprob),
            "bytes": list(data),
        }

    def _bytes(self, token_id: int) -> bytes:
        # Padding at the end of the vocabulary has weights but no token.
        return self.tokenizer.token_bytes(token_id) if token_id < self.tokenizer.vocab_size else b""


def finite(logprob: float) -> float:
    """A log probability that JSON can carry."""
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB
