"""What the gateway says of a model's defaults is what the bundled engine does."""

from __future__ import annotations

import pytest

from engine.server.model import Model
from engine.server.params import SamplingDefaults, chat_options
from engine.server.sampling import BEAM_FIELDS
from engine.server.schema import ChatExtras, parse_chat
from gateway.model_defaults import model_defaults
from gateway.settings import Settings
from tests.engine.serving import encode_chat

BARE = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
ENGINE = {
    "models": {"m": {"tier": "small", "backend": "local"}},
    "backends": {"local": {"engine": "e"}},
    "engines": {"e": {"model": "m", "sampling": {"temperature": 0.6, "top_p": 0.9}}},
}


@pytest.fixture
def engine_model(smollm2_path) -> Model:
    return Model.load(smollm2_path, "m")


def test_spelling_a_default_out_changes_nothing_in_the_engine(engine_model: Model) -> None:
    defaults = model_defaults(Settings.model_validate(ENGINE), "m")
    sampling = SamplingDefaults(temperature=0.6, top_p=0.9)

    def effect(body: dict[str, object]) -> object:
        request, extras = parse_chat({**BARE, **body})
        options = chat_options(request, extras, engine_model.vocab_size, sampling)
        return options, encode_chat(engine_model, BARE["messages"], extras)

    for name, value in defaults.items():
        assert effect({name: value}) == effect({}), name


def test_every_sampling_field_of_the_engine_has_a_default() -> None:
    """A field that is forgotten here costs hits only; that it is not is worth a test all the same."""
    known = set(model_defaults(Settings.model_validate(ENGINE), "m"))
    # No value of theirs means the same as none.
    without_default = {"cache_salt", "structured_outputs", "prompt_logprobs", *BEAM_FIELDS}
    without_default |= {"deadline_ms", "tenant", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
    assert set(ChatExtras.__struct_fields__) - without_default <= known


def test_of_another_server_the_gateway_knows_what_it_fills_in_itself() -> None:
    document = {
        "models": {
            "bounded": {"tier": "small", "backend": "other", "max_output_tokens": 99},
            "free": {"tier": "small", "backend": "other"},
        },
        "backends": {"other": {"base_urls": ["http://127.0.0.1:9/v1"]}},
    }
    settings = Settings.model_validate(document)
    assert model_defaults(settings, "bounded") == {"max_completion_tokens": 99}
    assert model_defaults(settings, "free") == {}
