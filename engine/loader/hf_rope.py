"""The rotary embedding that a config.json describes, in the older form and the newer one."""

from __future__ import annotations

from engine.loader.hf_families import HfFamily
from engine.loader.hf_values import HfValues
from engine.loader.layers import longrope_attention_factor, yarn_attention_factor
from engine.models.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)

_LOCAL_THETA = 10_000.0


def read_rope(values: HfValues, family: HfFamily, head_dim: int, *, local: bool = False) -> RopeSpec:
    """The rotary embedding of the layers without a window, or with `local` of those with one.

    Raises ModelFileError for a kind of scaling that is not known, ValueError for numbers that do not fit together.
    """
    newer = values.part("rope_parameters")
    kinds = ("full_attention", "sliding_attention")
    if newer is not None and any(kind in newer for kind in kinds):
        newer = newer.part(kinds[local])
        if newer is None:
            raise values.fault(f"rope_parameters has nothing for {kinds[local]}")
    if newer is not None:
        theta = newer.number("rope_theta", values.number("rope_theta", 10_000.0))
        parameters: HfValues | None = newer
    elif local:
        theta, parameters = values.number("rope_local_base_freq", _LOCAL_THETA), None
    else:
        theta, parameters = values.number("rope_theta", 10_000.0), values.part("rope_scaling")
    share = values.number("partial_rotary_factor", 1.0)
    if parameters is not None:
        share = parameters.number("partial_rotary_factor", share)
    scaling = None if parameters is None else _scaling(values, parameters, family)
    return RopeSpec(theta, int(head_dim * share), scaling)


def _scaling(values: HfValues, parameters: HfValues, family: HfFamily) -> RopeScaling | None:
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if kind == "su" or (kind == "yarn" and family.yarn_is_longrope):
        kind = "longrope"
    context = values.integer("max_position_embeddings")
    trained = values.integer(  # where it is said twice, the models' own library takes this one
        "original_max_position_embeddings", parameters.integer("original_max_position_embeddings", context)
    )
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(parameters.number("factor"))
        case "dynamic":
            return DynamicScaling(parameters.number("factor"), context)
        case "llama3":
            return Llama3Scaling(
                parameters.number("factor"),
                parameters.number("low_freq_factor"),
                parameters.number("high_freq_factor"),
                trained,
            )
        case "yarn":
            return _yarn(parameters, context, trained)
        case "longrope":
            factor = parameters.number("factor", context / trained)
            attention_factor = longrope_attention_factor(factor, trained)
            return LongRopeScaling(
                parameters.numbers("short_factor"),
                parameters.numbers("long_factor"),
                trained,
                parameters.number("attention_factor", attention_factor),
            )
    known = "default, linear, dynamic, llama3, yarn, longrope"
    raise values.fault(f"rope scaling {kind!r} is not supported", f"Use a model with one of: {known}")


def _yarn(parameters: HfValues, context: int, trained: int) -> YarnScaling:
    factor = parameters.number("factor", context / trained)
    attention_factor = yarn_attention_factor(factor)
    if "mscale" in parameters and "mscale_all_dim" in parameters:
        weights = parameters.number("mscale"), parameters.number("mscale_all_dim")
        if all(weights):
            attention_factor = yarn_attention_factor(factor, weights[0]) / yarn_attention_factor(factor, weights[1])
    return YarnScaling(
        factor,
        trained,
        parameters.number("attention_factor", attention_factor),
        parameters.number("beta_fast", 32.0),
        parameters.number("beta_slow", 1.0),
        parameters.flag("truncate") if "truncate" in parameters else True,
    )
