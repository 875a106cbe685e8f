"""Reads from `config.json` how a model rotates queries and keys."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from baton.engine.loader.settings import Settings
from baton.engine.model_config import LongRopeScaling, OtherAttention, RopeScaling, YarnScaling

OF_NO_SCALING = "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"
"""Settings of `rope_parameters` that say nothing about scaling."""


def one_rope(values: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Settings in which `rope_scaling` and `rope_parameters` do not contradict each other.

    As in transformers 5.23, `rope_scaling` replaces `rope_parameters`. Model cards say to add it for longer
    prompts. transformers then forgets what only `rope_parameters` says and takes defaults, such as a
    `rope_theta` of 10,000. That, and settings of several types of layers, raise `ValueError`."""
    scaling, rope = values.get("rope_scaling"), values.get("rope_parameters")
    if not (isinstance(scaling, Mapping) and isinstance(rope, Mapping) and scaling and rope):
        return values
    if any(isinstance(each, Mapping) for each in (*scaling.values(), *rope.values())):
        lost, remedy = scaling != rope, "move its settings into those of full_attention there"
    else:
        lost = [
            key for key in OF_NO_SCALING if key in rope and key not in scaling and values.get(key) is None
        ]
        remedy = f"name {', '.join(lost)} in rope_scaling, too, or move its settings into rope_parameters"
    if lost:
        raise ValueError(f"{source}: rope_scaling contradicts rope_parameters: {remedy}")
    return {**values, "rope_parameters": None}


def ropes(settings: Settings) -> tuple[Any, Any]:
    """The settings of rotation, and those of layers with a window where they have their own (Gemma 3).

    transformers 5 has all of them in one dictionary, older versions have several keys."""
    rope, local = settings.get("rope_parameters") or settings.get("rope_scaling") or {}, {}
    if not isinstance(rope, Mapping):
        return rope, local
    if "full_attention" in rope:
        rope, local = rope["full_attention"], rope.get("sliding_attention") or {}
    original = settings.get("original_max_position_embeddings")  # of Phi-3, where it takes precedence
    if original is not None and isinstance(rope, Mapping) and "long_factor" in rope:
        rope = {**rope, "original_max_position_embeddings": original}
    return rope, local


def rope_theta(rope: Settings, default: float) -> float:
    theta = rope.number("rope_theta", default)
    if theta <= 1:
        raise ValueError(f"{rope.source}: rope_theta {theta} is not supported (it must be above 1)")
    return theta


def rope_scaling(
    rope: Settings, context: int, frequencies: int
) -> RopeScaling | YarnScaling | LongRopeScaling | None:
    """`context`: the one that the configuration names. `frequencies`: how many a head has."""
    number, source = rope.number, rope.source
    kind = rope.get("rope_type") or rope.get("type") or "default"
    match "longrope" if "long_factor" in rope.values else kind:  # which older checkpoints name otherwise
        case "default":
            return None
        case "dynamic":  # turns as without it up to the context that is named, and Baton goes no further
            number("factor")
            return None
        case "linear":
            return RopeScaling("linear", number("factor"))
        case "llama3":
            return RopeScaling(
                "llama3",
                number("factor"),
                number("low_freq_factor"),
                number("high_freq_factor"),
                int(number("original_max_position_embeddings")),
            )
        case "yarn":
            original = max(1, int(number("original_max_position_embeddings", context)))
            factor = number("factor", context / original)
            return YarnScaling(
                factor,
                original,
                _yarn_attention_factor(rope, factor),
                number("beta_fast", 32.0),
                number("beta_slow", 1.0),
                truncate=bool(rope.get("truncate", True)),
            )
        case "longrope":
            original = int(number("original_max_position_embeddings", context))
            if original < 2:
                raise ValueError(
                    f"{source}: original_max_position_embeddings must be above 1, not {original}"
                )
            factor = number("factor", context / original)
            default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            names = "short_factor", "long_factor"
            short, long = (_factors(rope, name, frequencies) for name in names)
            return LongRopeScaling(short, long, original, number("attention_factor", default))
        case other:
            kinds = "default, dynamic, linear, llama3, longrope, yarn"
            raise ValueError(f"{source}: rope scaling {other!r} is not supported ({kinds} are)")


def _factors(rope: Settings, name: str, count: int) -> tuple[float, ...]:
    values = rope.get(name)
    if (
        not isinstance(values, list)
        or len(values) != count
        or not all(type(value) in (int, float) and 0 < value < math.inf for value in values)
    ):
        raise ValueError(f"{rope.source}: {name} must be a list of {count} numbers above 0, not {values!r}")
    return tuple(map(float, values))


def _yarn_attention_factor(rope: Settings, factor: float) -> float:
    """The one in the configuration. Else it follows from the factor, or from two multiples of its logarithm
    (DeepSeek)."""
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def scale(multiple: float) -> float:
        return 0.1 * multiple * math.log(factor) + 1 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)


def rotary_dim(settings: Settings, rope: Settings, default: float, head_dim: int) -> int:
    """`ModelConfig.rotary_dim`. `default`: the part of a head that is rotated, if no setting says it."""
    source = settings.source
    named = [values.get("partial_rotary_factor") for values in (rope, settings)]
    factor = next((factor for factor in named if factor is not None), default)
    if not isinstance(factor, (int, float)) or not 0 < factor <= 1:
        raise ValueError(f"{source}: partial_rotary_factor must be above 0 and at most 1, not {factor!r}")
    rotated = int(head_dim * factor)
    if rotated % 2 or head_dim % 2:
        raise ValueError(f"{source}: partial_rotary_factor {factor} of {head_dim} dimensions is not even")
    return rotated


def local_rope(settings: Settings, types: Sequence[str]) -> OtherAttention:
    """Layers with a window that have a rotation of their own, as in Gemma 3. `types`: those of the layers."""
    _, local = ropes(settings)
    whole = settings.get("rope_parameters")
    if isinstance(whole, Mapping) and whole and "full_attention" not in whole:  # transformers ignores them
        raise ValueError(
            f"{settings.source}: rope_parameters has no full_attention: move its settings into that, and "
            "those of layers with a window into sliding_attention"
        )
    if not isinstance(local, Mapping) or local.get("rope_type") not in (None, "default"):
        raise ValueError(
            f"{settings.source}: rope scaling {local!r} of layers with a window is not supported"
        )
    default = settings.number("rope_local_base_freq", 10000.0)
    theta = rope_theta(Settings(local, settings.source), default)
    return OtherAttention(tuple(i for i, kind in enumerate(types) if kind == "sliding_attention"), theta)
