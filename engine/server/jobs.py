"""From a request's body to a job that is ready to run: parameters, prompt, what the answer must be, and its dialect.

    body ── read ──→ options, what is asked ──→ prompt (template, tokenizer) ──→ grammar (checked) ──→ job

Each step runs in the lane for texts of its size, so nothing long holds up the event loop.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from backends.protocol import ChatRequest, InvalidRequest
from engine.client import EngineClient
from engine.grammar.checker import GrammarChecker
from engine.grammar.compiling import GrammarError, Vocabulary
from engine.grammar.lark import Grammar
from engine.server.asked import Asked, read_asked, template_variables
from engine.server.dialect import ChatDialect, CompletionDialect
from engine.server.echo import Echo, echo
from engine.server.errors import ApiError, unsupported
from engine.server.lanes import Lanes
from engine.server.model import ChatPrompt, Model
from engine.server.params import Options, chat_options, completion_options
from engine.server.predicted import predicted_text
from engine.server.reply_form import of_text
from engine.server.respond import Job
from engine.server.sampling import bad_word_ids
from engine.server.schema import decode_object, parse_chat, parse_completion
from engine.server.writer import ReplyWriter
from engine.text.answer import EngineDown, Generation
from engine.text.detokenizer import Detokenizer
from engine.text.renderer import RenderedTooLong
from engine.types import BeamParams


@dataclasses.dataclass(frozen=True, slots=True)
class _Constraint:
    """What the core is told of an answer, and which control tokens its reader must see."""

    grammar: str | None = None
    shown: frozenset[int] = frozenset()


class Jobs:
    """Makes jobs for one model and its engine."""

    def __init__(self, model: Model, client: EngineClient, lanes: Lanes) -> None:
        self._model = model
        self._client = client
        self._lanes = lanes
        self._form = model.form
        self._checker = GrammarChecker(lambda: Vocabulary.of(model.tokenizer, model.vocab_size))

    async def stop(self) -> None:
        """End the process that checks grammars."""
        await self._checker.stop()

    @property
    def max_total_tokens(self) -> int:
        """What one request can hold. Raises EngineDown while there is no engine."""
        ready = self._client.ready
        if ready is None:
            raise EngineDown("The model is not loaded. Try again in a few seconds.")
        return ready.max_total_tokens

    # --- chats ---------------------------------------------------------------------------------------------------

    async def chat(self, raw: bytes, request_id: str) -> Job:
        """Raises what `as_api_error` knows."""
        lane = self._lanes.of(len(raw))
        options, conversation, asked = await lane.run(self._read_chat, raw)
        text = await self._chat_text(conversation, len(raw))
        prompt = await self._lanes.of(len(text)).run(self._model.chat_ids, conversation, text)
        in_thought = self._form.in_thought(text)
        grammar = await self._checked(await lane.run(self._form.grammar, asked, in_thought=in_thought), asked, options)
        write = partial(self._writer, asked, in_thought=in_thought)
        dialect = ChatDialect(self._model, prompt, write, thinks=self._form.thinks, **_dialect_options(options))
        return self._job(options, [prompt], request_id, dialect, _Constraint(grammar, self._form.markers(asked)))

    async def chat_ids(self, conversation: ChatPrompt, size: int) -> list[int]:
        """Token ids of a conversation that came in a body of `size` bytes."""
        text = await self._chat_text(conversation, size)
        return await self._lanes.of(len(text)).run(self._model.chat_ids, conversation, text)

    def _read_chat(self, raw: bytes) -> tuple[Options, ChatPrompt, Asked]:
        body = decode_object(raw)
        request, extras = parse_chat(body)
        adapter = self.adapter_of(request.model)
        options = chat_options(request, extras, self._model.vocab_size, self._model.sampling)
        self._check_options(options)
        options = dataclasses.replace(options, prediction=self._prediction(request), adapter=adapter)
        asked = read_asked(request, extras)
        extras.chat_template_kwargs = template_variables(request, extras, self._model.template)
        tools = None if asked.tools is None else asked.tools.definitions
        conversation = self._model.conversation(body["messages"], extras, self.max_total_tokens, tools=tools)
        return options, conversation, asked

    def _prediction(self, request: ChatRequest) -> tuple[int, ...]:
        """The tokens of what the client expects. Raises ApiError where nothing looks there for drafts."""
        text = predicted_text(request.prediction)
        if text and self._client.config.speculative != "ngram":
            raise unsupported("prediction", "Leave it out, or start the engine with '--speculative ngram'.")
        return tuple(self._model.tokenizer.encode(text, add_special=False)[: self.max_total_tokens])

    async def _chat_text(self, conversation: ChatPrompt, size: int) -> str:
        """What the template makes of a conversation."""
        try:
            return await self._lanes.of(size).renderer.render(conversation.asked)
        except RenderedTooLong as error:
            self._model.check_length(error.characters, self.max_total_tokens, "messages")
            raise

    def _writer(self, asked: Asked, *, in_thought: bool) -> ReplyWriter:
        parser = self._form.parser(asked, in_thought=in_thought)
        return ReplyWriter(parser, short_ids=self._form.family.short_ids)

    # --- text completions ----------------------------------------------------------------------------------------

    async def completion(self, raw: bytes, request_id: str) -> Job:
        """Raises what `as_api_error` knows."""
        options, prompts, dialect, asked = await self._lanes.of(len(raw)).run(self._read_completion, raw)
        grammar = None if asked.format is None else of_text(asked.format)
        checked = await self._checked(grammar, asked, options)
        return self._job(options, prompts, request_id, dialect, _Constraint(checked))

    def _read_completion(self, raw: bytes) -> tuple[Options, list[list[int]], CompletionDialect, Asked]:
        request, extras = parse_completion(decode_object(raw, tokens="prompt"))
        adapter = self.adapter_of(request.model)
        options = completion_options(request, extras, self._model.vocab_size, self._model.sampling)
        options = dataclasses.replace(options, adapter=adapter)
        # Counted before anything is made of them: a small body can ask for a great many.
        self._check_options(options)
        if isinstance(request.prompt, list) and not isinstance(next(iter(request.prompt), 0), int):
            self._check_answers(options.best_of * len(request.prompt), "prompt")
        asked = read_asked(request, extras)
        prompts = self.prompt_ids(request.prompt, "prompt", add_special=extras.add_special_tokens is not False)
        echoes = self._echoes(request.prompt, prompts, options.skip_special) if request.echo else None
        dialect = CompletionDialect(self._model, prompts, echoes, options.n, **_dialect_options(options))
        return options, prompts, dialect, asked

    def prompt_ids(
        self, prompt: str | list[str | int | list[int]], param: str, *, add_special: bool
    ) -> list[list[int]]:
        """One list of token ids per prompt of the field `param`.

        Raises:
            InvalidRequest: an empty list, or texts and ids mixed.
        """
        if isinstance(prompt, str):
            prompt = [prompt]
        if not prompt:
            raise InvalidRequest(f"'{param}' must not be an empty list.", param=param, code="empty_array")
        texts = [item for item in prompt if isinstance(item, str)]
        ids = [item for item in prompt if isinstance(item, int)]
        lists = [item for item in prompt if isinstance(item, list)]
        if len(prompt) not in (len(texts), len(ids), len(lists)):
            text = f"'{param}' must hold texts, token ids or lists of token ids, not a mixture."
            raise InvalidRequest(text, param=param)
        prompts = lists or ([ids] if ids else [self.text_ids(text, param, add_special=add_special) for text in texts])
        for token_ids in prompts:
            self._model.check_ids(token_ids, param)
            if not token_ids:
                raise InvalidRequest(f"Each text of '{param}' must have at least one token.", param=param)
        return prompts

    def text_ids(self, text: str, param: str, *, add_special: bool) -> list[int]:
        """Token ids of a text of the field `param`. Raises ApiError if it can never fit."""
        self._model.check_length(len(text), self.max_total_tokens, param)
        return self._model.tokenizer.encode(text, add_special=add_special)

    def _echoes(
        self, prompt: str | list[str | int | list[int]], prompts: list[list[int]], skip_special: bool
    ) -> list[Echo]:
        """The prompts as text: the client's own where it sent text."""
        given = [prompt] if isinstance(prompt, str) else [item for item in prompt if isinstance(item, str)]
        texts: list[str] | list[None] = given or [None] * len(prompts)
        return [
            echo(self._model.tokenizer, ids, text, skip_special=skip_special)
            for ids, text in zip(prompts, texts, strict=True)
        ]

    # --- both ----------------------------------------------------------------------------------------------------

    def adapter_of(self, requested: str) -> str | None:
        """The adapter that a request's `model` names; None: it names the model itself.

        Raises:
            ApiError: 404, it names neither.
        """
        adapters = self._client.adapters
        self._model.check_name(requested, (adapter.name for adapter in adapters))
        return requested if requested in adapters else None

    def _check_options(self, options: Options) -> None:
        """Raises ApiError if one prompt asks for more than the engine holds."""
        self._check_answers(options.best_of, "n" if options.best_of == options.n else "best_of")
        beam, most = options.params.beam, self._client.max_rows
        if beam is not None and beam.width > most:
            text = f"{beam.width} beams asked for; this engine runs at most {most} requests at a time."
            raise ApiError(400, text, code="too_many_answers", param="beam_width")

    def _check_answers(self, answers: int, param: str) -> None:
        """Raises ApiError if one request asks for more answers than the engine ever holds."""
        most = self._client.max_answers
        if answers > most:
            raise ApiError(
                400,
                f"{answers} answers asked for at once; this engine holds at most {most}.",
                code="too_many_answers",
                param=param,
            )

    async def _checked(self, grammar: Grammar | None, asked: Asked, options: Options) -> str | None:
        """The text of a grammar that compiles.

        Raises:
            ApiError: it does not.
            InvalidRequest: it is asked for together with beam search.
        """
        if grammar is None:
            return None
        if options.params.beam is not None:
            raise InvalidRequest(f"'{asked.param}' does not go with 'use_beam_search'.", param=asked.param)
        try:
            return await self._checker.check(grammar)
        except GrammarError as error:
            text = f"Answers cannot be held to '{asked.param}': {error}"
            raise ApiError(400, text, code="invalid_grammar", param=asked.param) from error

    def _job(
        self,
        options: Options,
        prompts: list[list[int]],
        request_id: str,
        dialect: ChatDialect | CompletionDialect,
        constraint: _Constraint,
    ) -> Job:
        room = self._room(options.params.beam)
        options = dataclasses.replace(
            options,
            params=dataclasses.replace(
                options.params, bad_words=bad_word_ids(options.bad_words, self._model.tokenizer)
            ),
        )
        if (longest := max(map(len, prompts))) >= room:
            beam = options.params.beam
            holds = f"{room} tokens of a request" if beam is None else f"{room} tokens for each of {beam.width} beams"
            raise ApiError(
                400,
                f"The prompt has {longest} tokens and at least 1 must be generated, but this engine holds {holds}.",
                code="context_length_exceeded",
                param=dialect.prompt_field,
            )
        generations = [
            self._generation(options, prompt, constraint, index, room - len(prompt), group)
            for group, prompt in enumerate(prompts)
            for index in range(options.best_of)
        ]
        return Job(
            model_name=options.adapter or self._model.name,
            request_id=request_id,
            generations=generations,
            n=options.n,
            best_of=options.best_of,
            dialect=dialect,
            stream=options.stream,
            include_usage=options.include_usage,
            deadline_ms=options.deadline_ms,
        )

    def _generation(
        self, options: Options, prompt: list[int], constraint: _Constraint, index: int, room: int, group: int
    ) -> Generation:
        params = options.params_for(index, room)
        detokenizer = Detokenizer(
            self._model.tokenizer,
            stop=options.stop,
            include_stop=options.include_stop,
            min_tokens=params.min_tokens,
            skip_special=options.skip_special,
            opens_with_space=self._model.tokenizer.opens_with_space(prompt),
            shown=constraint.shown,
        )
        siblings = group if options.best_of > 1 else None
        salt, grammar = options.cache_salt, constraint.grammar
        return Generation(
            prompt,
            params,
            detokenizer,
            salt,
            siblings,
            grammar,
            options.prediction,
            options.adapter,
            options.tenant,
            options.priority,
        )

    def _room(self, beam: BeamParams | None) -> int:
        """How many tokens one sequence can have. Beams divide the pages among them, so that all of them always fit."""
        room, ready = self.max_total_tokens, self._client.ready
        if beam is None or ready is None:
            return room
        return min(room, (ready.num_blocks - 1) // beam.width * ready.block_size)


def _dialect_options(options: Options) -> dict[str, Any]:
    return {
        "logprobs": options.params.logprobs is not None,
        "return_token_ids": options.return_token_ids,
        "stop_token_ids": options.params.stop_token_ids,
        "prompt_logprobs": options.prompt_logprobs,
    }
