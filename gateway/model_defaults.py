"""What a model does where a request names no value, as far as the gateway knows.

The cache asks: a request that spells a default out means the same as one that leaves it to the model, and whether an
unnamed temperature makes answers differ is the model's doing. Of servers other than the bundled engine nothing is
known but the limit that the gateway itself fills in: many take sampling defaults of their own from each model.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.settings import Settings

# The bundled engine's own defaults, beside those that `engines.*.sampling` sets; a test holds them to the engine.
_ENGINE: Mapping[str, object] = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "bad_words": [],
    "chat_template_kwargs": {},
    "continue_final_message": False,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "min_p": 0,
    "min_tokens": 0,
    "priority": 0,
    "repetition_penalty": 1,
    "return_token_ids": False,
    "skip_special_tokens": True,
    "stop_token_ids": [],
    "top_k": 0,
    "typical_p": 1,
    "use_beam_search": False,
    "verbosity": "medium",
}


def model_defaults(settings: Settings, name: str) -> dict[str, object]:
    """Request fields and the values that count for model `name` where a request leaves them out."""
    model = settings.models[name]
    defaults: dict[str, object] = {}
    backend = settings.backends[model.backend]
    if backend.engines and not backend.urls:  # of several, the first speaks for all: they are replicas of each other
        sampling = settings.engines[backend.engines[0]].sampling
        defaults |= {**_ENGINE, "temperature": sampling.temperature, "top_p": sampling.top_p}
    if model.max_output_tokens is not None:
        defaults["max_completion_tokens"] = model.max_output_tokens
    return defaults
