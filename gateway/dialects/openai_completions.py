"""`POST /v1/completions`: text in, its continuation out, for backends that serve this older route."""

from __future__ import annotations

from backends.protocol import CompletionRequest, InvalidRequest
from backends.validation import check_completion
from gateway.dialects import errors
from gateway.dialects.dialect import Asked, Writer
from gateway.dialects.errors import BadRequest, GatewayError
from gateway.dialects.openai_answer import chunk_writer
from gateway.dialects.openai_embeddings import texts_of
from gateway.dialects.reading import bad_request, beams, convert, decode
from tiers.features import estimate_tokens

_DEFAULT_MAX_TOKENS = 16  # what the dialect promises where the request does not say


class OpenAICompletions:
    """The text completions of the OpenAI SDKs. See `gateway.dialects.dialect.Dialect`."""

    route = "completions"
    keep_alive = b": keep-alive\n\n"
    request_id_header = "x-request-id"

    def parse(self, body: bytes) -> Asked:
        payload = decode(body, tokens="prompt")
        request = convert(payload, CompletionRequest)
        try:
            check_completion(request)
        except InvalidRequest as error:
            raise bad_request(error) from None
        if not request.prompt and isinstance(request.prompt, list):
            raise BadRequest("'prompt' must not be empty.", code="empty_array", param="prompt")
        prompts = texts_of(request.prompt, "prompt")
        if request.stream_options is not None and not request.stream:
            text = "'stream_options' is only allowed with 'stream': true."
            raise BadRequest(text, code="invalid_value", param="stream_options")
        best_of = max(request.best_of or 0, request.n or 1, beams(payload))
        return Asked(
            operation="completions",
            model=request.model,
            payload=payload,
            messages=[{"role": "user", "content": prompt} for prompt in prompts],
            stream=bool(request.stream),
            choices=len(prompts) * (request.n or 1),
            generated=len(prompts) * best_of,
            output_limit=("max_tokens", _DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens),
            needs={"logprobs": "logprobs"} if request.logprobs is not None else {},
            wants_usage=bool(request.stream_options and request.stream_options.include_usage),
            longest=lambda: max(map(estimate_tokens, prompts)),
            input_field="prompt",
        )

    def writer(self, asked: Asked, request_id: str) -> Writer:
        return chunk_writer(asked, request_id)

    def error(self, error: GatewayError, request_id: str) -> bytes:
        return errors.body(error, request_id)


COMPLETIONS = OpenAICompletions()
