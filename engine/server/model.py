"""The served model as the HTTP side knows it: name, tokenizer, template. No weights, no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.protocol import InvalidRequest, Json
from engine.loader import GenerationDefaults, ModelInfo, read_info
from engine.messages import Conversation
from engine.models.pooling import PoolingSpec, Task, choose_task
from engine.server.asked import uses_tools
from engine.server.errors import ApiError, unsupported
from engine.server.params import API_DEFAULTS, SamplingDefaults
from engine.server.reply_form import ReplyForm
from engine.server.schema import ChatExtras, check_messages
from engine.server.tools.prompting import tell
from engine.text.chat_template import RESERVED, ChatTemplate, ChatTemplateError, with_objects, with_text
from engine.text.literal_text import LiteralText, texts_of
from engine.text.tokenizer import Tokenizer
from engine.types import TokenLogprob

# JSON has no infinity; this is what OpenAI sends for an impossible token.
_LEAST_LOGPROB = -9999.0
_CONTINUE = "continue_final_message"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation on its way to token ids. `literals` as in `Tokenizer.encode`."""

    asked: Conversation  # of the template
    opened: str | None  # the last message's text, if the answer is to continue it
    add_special: bool
    literals: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Model:
    """Everything that turns requests into token ids and answers into text."""

    name: str
    created: int
    tokenizer: Tokenizer
    template: ChatTemplate
    vocab_size: int
    sampling: SamplingDefaults = API_DEFAULTS
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    hidden_size: int = 0
    pooling: PoolingSpec | None = None  # how it makes vectors or scores; None: it generates
    tokenizer_definition: str | None = None  # the text of its tokenizer.json, where it has one
    fingerprint: bytes = b""

    @classmethod
    def load(
        cls,
        path: Path,
        name: str,
        said: GenerationDefaults = GenerationDefaults(),
        *,
        recommended: bool = True,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        task: str = "auto",
    ) -> Model:
        """Read the model's description.

        `said` counts where a request names no value, then, if `recommended`, what the model's authors recommend. The
        parsers are names of `reply_form.py`, "auto" goes by the template. `task`: see `choose_task`.

        Raises:
            ModelFileError: the model cannot be served.
            ChatTemplateError: its chat template is broken.
            ValueError: the parsers contradict each other, or the model cannot do the task.
        """
        info = read_info(path)
        pooling = choose_task(task, info.pooling)
        tokens = info.tokenizer.tokens
        sampling = SamplingDefaults.of(said, *([info.generation] if recommended else []))

        def text(token_id: int | None) -> str:
            return "" if token_id is None else tokens[token_id]

        template = ChatTemplate(
            info.chat_template,
            bos_token=text(info.tokenizer.bos_id),
            eos_token=text(info.tokenizer.eos_id),
            tool_source=info.tool_template,
        )
        created = int(path.stat().st_mtime)
        model = cls(
            name,
            created,
            Tokenizer(info),
            template,
            info.spec.vocab_size,
            sampling,
            tool_parser,
            reasoning_parser,
            info.spec.hidden_size,
            pooling,
            info.tokenizer.definition,
            fingerprint(info),
        )
        _ = model.form
        return model

    @property
    def task(self) -> Task:
        """What it is served for."""
        return Task.GENERATE if self.pooling is None else self.pooling.task

    @property
    def form(self) -> ReplyForm:
        """How it writes thoughts and calls. Raises ValueError where the parsers contradict each other."""
        tokenizer = self.tokenizer
        control_ids = {tokenizer.token_bytes(i).decode(errors="replace"): i for i in sorted(tokenizer.special_ids)}
        return ReplyForm.choose(self.template, control_ids, tools=self.tool_parser, reasoning=self.reasoning_parser)

    def check_name(self, requested: str, adapters: Iterable[str] = ()) -> None:
        """Raises ApiError 404 if the request means neither the model nor one of its adapters."""
        names = (self.name, *adapters)
        if requested not in names:
            served = ", ".join(f"'{name}'" for name in names)
            raise ApiError(
                404,
                f"The model '{requested}' is not served here; this engine serves {served}.",
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

    def check_length(self, characters: int, most_tokens: int, param: str) -> None:
        """Raises ApiError if a text of so many characters has more than `most_tokens` tokens whatever they are."""
        most = most_tokens * self.tokenizer.longest_token
        if characters > most:
            raise ApiError(
                400,
                f"The prompt has {characters} characters, but this engine holds {most_tokens} tokens of a request, "
                f"each of {self.tokenizer.longest_token} characters at most: {most} characters.",
                code="context_length_exceeded",
                param=param,
            )

    def conversation(
        self,
        messages: list[Json],
        extras: ChatExtras,
        most_tokens: int,
        *,
        tools: list[Json] | None = None,
        documents: list[Json] | None = None,
    ) -> ChatPrompt:
        """What the model's template is to make a text of. `tools`, `documents`: as `ChatTemplate.render` takes them.

        Raises:
            ChatTemplateError: the messages cannot be written as they are.
            InvalidRequest: the fields of the prompt contradict each other.
            ApiError: a field that nothing reads, or more text than `most_tokens` tokens can stand for.
        """
        variables = extras.chat_template_kwargs
        for name in variables or ():
            if name in RESERVED:
                where = f"chat_template_kwargs.{name[:64]}"
                raise InvalidRequest(f"'{where}' is set by the engine itself; leave it out.", param=where)
        check_messages(messages, self.template.fields)
        if "tools" not in self.template.variables and (tools or any(map(uses_tools, messages))):
            messages, tools = tell(messages, tools or [], self.form.family), None
        opened = bool(extras.continue_final_message)
        if opened:
            _check_open(messages[-1] if messages else {}, extras)
        # OpenAI's newer name for the system role; templates know the older one.
        renamed = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
        given = [[with_objects(with_text(m)) for m in renamed], variables, tools, documents]
        # Before anything walks through them character by character. Roles are few words, and no text of the client's.
        characters = sum(map(len, texts_of(given))) - sum(len(message["role"]) for message in messages)
        self.check_length(characters, most_tokens, "messages")
        written = LiteralText(self.tokenizer.control_names)
        try:
            told, variables, tools, documents = written.hide(given)
        except ValueError as error:
            raise ChatTemplateError(str(error)) from error
        asked = Conversation(
            messages=told,
            add_generation_prompt=not opened and extras.add_generation_prompt is not False,
            variables=variables,
            most_characters=most_tokens * self.tokenizer.longest_token,
            tools=tools,
            documents=documents,
        )
        last = told[-1]["content"].strip() if opened else None
        return ChatPrompt(asked, last, bool(extras.add_special_tokens), written.texts)

    def chat_ids(self, prompt: ChatPrompt, text: str) -> list[int]:
        """Token ids of what the template made of a conversation.

        Raises:
            ApiError: the template has changed the text that the answer is to continue.
        """
        if prompt.opened is not None:
            text = _up_to(text, prompt.opened)
        # The template writes the beginning-of-sequence token itself if the model wants it.
        return self.tokenizer.encode(text, add_special=prompt.add_special, literals=prompt.literals)

    def token_text(self, token_id: int) -> str:
        """One token as text; bytes that are no whole character become U+FFFD."""
        return self._bytes(token_id).decode("utf-8", errors="replace")

    def chat_logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """OpenAI's `logprobs` object of a chat choice."""
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def prompt_logprobs(self, entries: Sequence[TokenLogprob], count: int) -> list[dict[str, Any] | None]:
        """vLLM's form: per token of the prompt itself and the `count` likeliest, by id; of the first one nothing."""
        return [None, *(self._ranked(entry, count) for entry in entries)]

    def _ranked(self, entry: TokenLogprob, count: int) -> dict[str, Any]:
        ranks = {token_id: (value, rank) for rank, (token_id, value) in enumerate(entry.top[:count], 1)}
        ranks.setdefault(entry.token_id, (entry.logprob, entry.rank))
        return {
            str(token_id): {"logprob": finite(value), "rank": rank, "decoded_token": self.token_text(token_id)}
            for token_id, (value, rank) in ranks.items()
        }

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


def fingerprint(info: ModelInfo) -> bytes:
    """What models have in common whose weights may stand for each other: what texts mean to them, and their task."""
    spec, tokenizer = info.spec, info.tokenizer
    ends = dataclasses.replace(tokenizer, end_ids=frozenset())
    parts = (ends, sorted(tokenizer.end_ids), info.chat_template, info.tool_template, info.pooling)
    return hashlib.blake2b(repr((parts, spec.vocab_size, spec.hidden_size)).encode()).digest()


def _check_open(last: Json, extras: ChatExtras) -> None:
    """Raises InvalidRequest where the last message is none that an answer can go on from."""
    if extras.add_generation_prompt:
        raise InvalidRequest(f"'{_CONTINUE}' and 'add_generation_prompt' exclude each other.", param=_CONTINUE)
    content = last.get("content")
    if last.get("role") != "assistant" or not isinstance(content, str) or not content.strip():
        raise InvalidRequest(f"'{_CONTINUE}' needs a last message of the assistant with some text.", param=_CONTINUE)


def _up_to(prompt: str, content: str) -> str:
    """The prompt up to the end of the last message's text, for the model to go on from there."""
    start = prompt.rfind(content)  # templates may strip the message, so its stripped form is looked for
    if start < 0:
        raise unsupported(_CONTINUE, "The model's template changes the text of messages.")
    return prompt[: start + len(content)]


def finite(logprob: float) -> float:
    """A log probability that JSON can carry."""
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB
