"""From a request's fields to sampling parameters: every field is taken over or refused, with its name and the range.

The ranges of the OpenAI fields are checked by `backends.validation.validate`; here are those of vLLM's fields and those
that depend on the model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from backends.protocol import (
    MAX_SALT_CHARACTERS,
    ChatRequest,
    CompletionRequest,
    InvalidRequest,
    Message,
    StreamOptions,
)
from backends.validation import validate
from engine.loader.info import GenerationDefaults
from engine.server.errors import unsupported
from engine.server.sampling import MAX_LOGPROBS, beam_params, check_sampling, in_range
from engine.server.schema import ChatExtras, Extras
from engine.types import SamplingParams

MAX_BEST_OF = 128
MOST_PRIORITY = 100
MOST_DEADLINE_MS = 86_400_000  # a day
_FUNCTIONS_ADVICE = "Use 'tools', 'tool_choice' and messages of the role 'tool'."


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What counts where a request names no value: the API's own defaults, or what the model's authors recommend."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, *said: GenerationDefaults) -> SamplingDefaults:
        """Each value as the first of `said` that says something about it; else the API's own default."""
        values = (item for one in reversed(said) for item in asdict(one).items())
        return cls(**{name: value for name, value in values if value is not None})


API_DEFAULTS = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class Options:
    """What a request asks for beside its prompt. `max_tokens` None: as many as there is room for.

    `best_of` answers are generated for each prompt, and `n` of them given.
    """

    params: SamplingParams
    max_tokens: int | None
    n: int
    best_of: int
    stream: bool
    include_usage: bool
    stop: tuple[str, ...]
    include_stop: bool
    skip_special: bool
    return_token_ids: bool
    cache_salt: str | None
    bad_words: tuple[str | list[int], ...] = ()
    prompt_logprobs: int | None = None  # to be shown; scored for `echo`, they are not
    prediction: tuple[int, ...] = ()  # the tokens of what the client expects
    tenant: str = ""  # tenants share the engine fairly
    priority: int = 0  # smaller is more urgent
    deadline_ms: int | None = None  # from the arrival of the request
    adapter: str | None = None  # that the request's model names

    def params_for(self, index: int, room: int) -> SamplingParams:
        """Parameters of choice `index` when `room` tokens fit behind the prompt. Each choice has its own seed."""
        seed = self.params.seed
        if seed is not None:
            seed = (seed + index + (1 << 63)) % (1 << 64) - (1 << 63)
        room = max(1, room)
        limit = room if self.max_tokens is None else min(self.max_tokens, room)
        params = self.params
        return replace(
            params,
            seed=seed,
            max_tokens=limit,
            min_tokens=min(params.min_tokens, limit),
            # Answers are told apart by them.
            logprobs=0 if params.logprobs is None and self.best_of > self.n else params.logprobs,
            # The first answer to a prompt scores it for all.
            prompt_logprobs=params.prompt_logprobs if index == 0 else None,
        )


def chat_options(
    request: ChatRequest, extras: ChatExtras, vocab_size: int, defaults: SamplingDefaults = API_DEFAULTS
) -> Options:
    """Options of a chat request.

    Raises:
        InvalidRequest: a value out of range, or fields that contradict each other.
        ApiError: a parameter that this engine does not implement.
    """
    check_chat(request)
    if (
        request.max_tokens is not None
        and request.max_completion_tokens is not None
        and request.max_tokens != request.max_completion_tokens
    ):
        raise InvalidRequest("Give 'max_completion_tokens' or 'max_tokens', not both.", param="max_tokens")
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _options(request, extras, vocab_size, defaults, max_tokens=limit, logprobs=logprobs)


def completion_options(
    request: CompletionRequest, extras: Extras, vocab_size: int, defaults: SamplingDefaults = API_DEFAULTS
) -> Options:
    """Options of a text completion request; raises like `chat_options`."""
    scores_only = request.max_tokens == 0 and bool(request.echo)  # the prompt is wanted back, and nothing behind it
    # The fields that both endpoints share have the same ranges, so they are checked by the same function.
    shared = ChatRequest(
        model=request.model,
        messages=[Message("user", "")],
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        cache_salt=extras.cache_salt,
        max_tokens=None if scores_only else request.max_tokens,
        n=request.n,
        presence_penalty=request.presence_penalty,
        seed=request.seed,
        stop=request.stop,
        stream=request.stream,
        stream_options=request.stream_options,
        temperature=request.temperature,
        top_p=request.top_p,
    )
    validate(shared)
    if request.suffix:
        raise unsupported("suffix", "Put the whole text into 'prompt'.")
    n = request.n or 1
    if request.best_of is not None:
        in_range("best_of", request.best_of, n, MAX_BEST_OF)
        if request.best_of > n and request.stream:
            raise InvalidRequest("'best_of' above 'n' does not go with 'stream': true.", param="best_of")
    if request.logprobs is not None:
        in_range("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    limit = 16 if request.max_tokens is None else request.max_tokens  # the dialect's default
    return _options(
        shared,
        extras,
        vocab_size,
        defaults,
        max_tokens=limit,
        logprobs=request.logprobs,
        best_of=request.best_of,
        echo_logprobs=request.logprobs if request.echo else None,
    )


def _options(
    request: ChatRequest,
    extras: Extras,
    vocab_size: int,
    defaults: SamplingDefaults,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    best_of: int | None = None,
    echo_logprobs: int | None = None,
) -> Options:
    _check_extras(extras, vocab_size, max_tokens)
    check_sampling(extras, vocab_size, stream=bool(request.stream))
    scored = [count for count in (extras.prompt_logprobs, echo_logprobs) if count is not None]
    beam = beam_params(request, extras, logprobs=logprobs, best_of=best_of)
    if beam is not None and max_tokens == 0:
        raise InvalidRequest("'max_tokens' must be at least 1 for beam search.", param="max_tokens")
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    stream_options = request.stream_options or StreamOptions()
    if stream_options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", "Leave it out.")
    params = SamplingParams(
        temperature=_given(request.temperature, defaults.temperature),
        top_p=_given(request.top_p, defaults.top_p),
        top_k=max(0, defaults.top_k if extras.top_k is None else extras.top_k),
        min_p=_given(extras.min_p, defaults.min_p),
        repetition_penalty=_given(extras.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=request.seed,
        logit_bias=_logit_bias(request.logit_bias, vocab_size),
        logprobs=logprobs,
        min_tokens=extras.min_tokens or 0,
        stop_token_ids=frozenset(extras.stop_token_ids or ()),
        ignore_eos=bool(extras.ignore_eos),
        typical_p=_given(extras.typical_p, 1.0),
        prompt_logprobs=max(scored, default=None),
        beam=beam,
    )
    return Options(
        params=params,
        max_tokens=max_tokens,
        n=request.n or 1,
        best_of=best_of or request.n or 1,
        stream=bool(request.stream),
        include_usage=bool(stream_options.include_usage),
        stop=stop,
        include_stop=bool(extras.include_stop_str_in_output),
        skip_special=extras.skip_special_tokens is not False,
        return_token_ids=bool(extras.return_token_ids),
        cache_salt=extras.cache_salt,
        bad_words=tuple(extras.bad_words or ()),
        prompt_logprobs=extras.prompt_logprobs,
        tenant=extras.tenant or extras.cache_salt or "",
        priority=extras.priority or 0,
        deadline_ms=extras.deadline_ms,
    )


def _check_extras(extras: Extras, vocab_size: int, max_tokens: int | None) -> None:
    if extras.top_k is not None:
        in_range("top_k", extras.top_k, -1, 2**31 - 1)
    if extras.min_p is not None:
        in_range("min_p", extras.min_p, 0, 1)
    if extras.repetition_penalty is not None and not 0.01 <= extras.repetition_penalty <= 100:
        raise InvalidRequest(
            f"'repetition_penalty' must be between 0.01 and 100, got {extras.repetition_penalty}.",
            param="repetition_penalty",
        )
    if extras.min_tokens is not None:
        in_range("min_tokens", extras.min_tokens, 0, 2**31 - 1)
        if max_tokens is not None and extras.min_tokens > max_tokens:
            raise InvalidRequest(
                f"'min_tokens' ({extras.min_tokens}) must not be above the token limit ({max_tokens}).",
                param="min_tokens",
            )
    for token_id in extras.stop_token_ids or ():
        in_range("stop_token_ids", token_id, 0, vocab_size - 1)
    check_turn(extras.tenant, extras.priority, extras.deadline_ms)


def check_turn(tenant: str | None, priority: int | None, deadline_ms: int | None) -> None:
    """Whose a request is, how urgent, and until when it matters. Raises InvalidRequest for what is out of range."""
    if priority is not None:
        in_range("priority", priority, -MOST_PRIORITY, MOST_PRIORITY)
    if tenant is not None and not 1 <= len(tenant) <= MAX_SALT_CHARACTERS:
        raise InvalidRequest(f"'tenant' must have 1 to {MAX_SALT_CHARACTERS} characters.", param="tenant")
    if deadline_ms is not None:
        in_range("deadline_ms", deadline_ms, 1, MOST_DEADLINE_MS)


def check_chat(request: ChatRequest) -> None:
    """What of a chat request can be refused before its prompt is made.

    Raises:
        InvalidRequest: a value out of range, or fields that contradict each other.
        ApiError: a parameter that this engine does not implement.
    """
    validate(request)
    _refuse_chat_features(request)


def _refuse_chat_features(request: ChatRequest) -> None:
    if request.functions:
        raise unsupported("functions", _FUNCTIONS_ADVICE)
    if request.function_call not in (None, "none"):
        raise unsupported("function_call", _FUNCTIONS_ADVICE)
    if request.audio is not None:
        raise unsupported("audio", "Leave it out: answers are text.")
    if request.modalities not in (None, ["text"]):
        raise unsupported("modalities", 'Use ["text"].')
    if request.web_search_options is not None:
        raise unsupported("web_search_options", "Leave it out.")
    if request.store:
        raise unsupported("store", "Nothing is stored; leave it out.")
    if request.service_tier not in (None, "auto", "default"):
        raise unsupported("service_tier", 'Use "auto".')
    if request.verbosity not in (None, "medium"):
        raise unsupported("verbosity", "Leave it out.")
    for index, message in enumerate(request.messages):
        where = f"messages[{index}]"
        if message.function_call:
            raise unsupported(f"{where}.function_call", _FUNCTIONS_ADVICE)
        if message.role == "function":
            raise unsupported(f"{where}.role", _FUNCTIONS_ADVICE, what="'function'")
        for place, call in enumerate(message.tool_calls or ()):
            if call.function is None or not call.function.name:
                name = f"{where}.tool_calls[{place}].function.name"
                raise InvalidRequest(f"'{name}' is missing.", param=name, code="missing_required_parameter")
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part["type"] != "text":
                raise unsupported(f"{where}.content[{place}]", "Only text is read.", what=f"of type '{part['type']}'")


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    result = {int(token): value for token, value in (bias or {}).items()}
    for token_id in result:
        in_range("logit_bias", token_id, 0, vocab_size - 1)
    return result


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
