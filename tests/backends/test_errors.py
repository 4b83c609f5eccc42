"""Which errors of servers are recognised, in the words that the servers use."""

from __future__ import annotations

import msgspec
import pytest

from backends.attempt import AttemptFailed, kind_of
from backends.errors import recognised
from backends.openai import OPENAI

TOO_LONG = "context_length_exceeded"
BLOCKED = "content_policy_violation"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"message": "prompt is too long: 203284 tokens > 200000 maximum"}, TOO_LONG),
        ({"message": "input length and `max_tokens` exceed context limit: 178959 + 64000 > 200000"}, TOO_LONG),
        ({"message": "This model's maximum context length is 4096 tokens. However, you requested 5000."}, TOO_LONG),
        ({"message": "The input (90 tokens) is longer than the model's context length (64 tokens)."}, TOO_LONG),
        ({"message": "The decoder prompt (length 90) is longer than the maximum model length of 64."}, TOO_LONG),
        ({"message": "the request exceeds the available context size", "type": "exceed_context_size_error"}, TOO_LONG),
        ({"message": "The input token count (90) exceeds the maximum number of tokens allowed (64)."}, TOO_LONG),
        ({"message": "anything", "code": TOO_LONG}, TOO_LONG),
        ({"message": "Output blocked by content filtering policy"}, BLOCKED),
        ({"message": "The response was filtered by Azure OpenAI's content management policy."}, BLOCKED),
        ({"message": "filtered", "code": "content_filter"}, BLOCKED),
        ({"message": "Your prompt was flagged as potentially violating our usage policy."}, BLOCKED),
        ({"message": "blocked by the content filter: context length", "code": TOO_LONG}, TOO_LONG),
        ({"message": "context length of the filtered text", "code": BLOCKED}, BLOCKED),
        ({"message": "temperature: must be at most 1"}, None),
        ({"message": "max_tokens: must be at least 1", "code": "invalid_value"}, "invalid_value"),
        ({"message": "Number of request tokens has exceeded your per-minute rate limit"}, None),
        ({"message": None}, None),
        ({}, None),
    ],
)
def test_codes(error, code):
    assert recognised(error).get("code") == code


def test_a_status_in_place_of_the_code_is_kept():
    error = {"message": "This model's maximum context length is 64 tokens.", "type": "BadRequestError", "code": 400}
    assert recognised(error) == {**error, "code": TOO_LONG, "status": 400}
    failure = AttemptFailed.reported(recognised(error))
    assert failure.status == 400
    assert failure.said["code"] == TOO_LONG


def test_the_openai_dialect_recognises():
    body = msgspec.json.encode({"error": {"message": "maximum context length is 64 tokens", "code": 400}})
    assert OPENAI.error(body) == {"message": "maximum context length is 64 tokens", "code": TOO_LONG, "status": 400}
    assert OPENAI.error(b"{}") is None
    assert OPENAI.error(b"<html>") is None


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (429, "rate_limited"),
        (529, "overloaded"),
        (500, "upstream_error"),
        (400, "upstream_error"),
        (None, "upstream_error"),
    ],
)
def test_kinds(status, kind):
    assert kind_of(status) == kind
    assert AttemptFailed.reported({"code": status}).kind == kind


def test_a_code_in_words_does_not_hide_the_status():
    failure = AttemptFailed.reported({"code": "overloaded", "status": 529})
    assert (failure.kind, failure.status) == ("overloaded", 529)
