"""Reads the state layers from `config.json`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton.engine.loader.settings import Settings
from baton.engine.model_config import StateConfig

KINDS = {
    "mamba": True,
    "linear_attention": True,
    "conv": True,
    "attention": False,
    "full_attention": False,
}
"""Types of layers, in the words of several versions: whether a layer has states."""


def mamba2_config(settings: Settings, norm_eps: float) -> StateConfig:
    """Raises `ValueError` naming the key that is wrong or not supported."""
    integer, source = settings.integer, settings.source
    layers = state_layers(settings, integer("num_hidden_layers"))
    heads, inner = integer("mamba_n_heads", 128), integer("mamba_expand", 2) * integer("hidden_size")
    head_dim = inner // heads if settings.get("mamba_d_head") in (None, "auto") else integer("mamba_d_head")
    groups = integer("mamba_n_groups", 1)
    if heads * head_dim != inner or heads % groups:
        raise ValueError(
            f"{source}: {heads} Mamba heads of {head_dim} in {groups} groups do not fit mamba_expand, which "
            f"makes {inner} columns"
        )
    return StateConfig(
        layers,
        heads,
        head_dim,
        integer("mamba_d_state", 256),
        groups,
        integer("mamba_d_conv", 4),
        bool(settings.get("mamba_conv_bias", True)),
        bool(settings.get("mamba_proj_bias", False)),
        dt_limits(settings),
        norm_eps,
    )


def dt_limits(settings: Settings) -> tuple[float, float]:
    """As in `StateConfig`."""
    limits = settings.get("time_step_limit") or (0.0, math.inf)
    if not isinstance(limits, Sequence) or len(limits) != 2:
        raise ValueError(f"{settings.source}: time_step_limit must be two numbers, not {limits!r}")
    low, high = (_number(limit, settings.source) for limit in limits)
    return low, high


def gated_delta_config(settings: Settings, norm_eps: float) -> StateConfig:
    """As `mamba2_config`, for the state layers of Qwen3-Next."""
    integer = settings.integer
    count, interval = integer("num_hidden_layers"), integer("full_attention_interval", 4)
    if settings.get("layer_types") is None:
        kinds = ["attention" if layer % interval == 0 else "mamba" for layer in range(1, count + 1)]
        settings = Settings({**settings.values, "layer_types": kinds}, settings.source)
    heads, groups = integer("linear_num_value_heads", 32), integer("linear_num_key_heads", 16)
    if heads % groups:
        raise ValueError(f"{settings.source}: {heads} value heads on {groups} key heads is not supported")
    return StateConfig(
        state_layers(settings, count),
        heads,
        integer("linear_value_head_dim", 128),
        integer("linear_key_head_dim", 128),
        groups,
        integer("linear_conv_kernel_dim", 4),
        conv_bias=False,
        proj_bias=False,
        dt_limits=(0.0, math.inf),
        norm_eps=norm_eps,
    )


DTYPES = ("float32", "bfloat16", "float16")
"""Of the states of heads."""
_DTYPE_KEYS = "mamba_ssm_dtype", "mamba_ssm_cache_dtype"
"""Of Qwen3.5, and of Nemotron-H."""


def with_dtype(shape: StateConfig, settings: Settings) -> StateConfig:
    """The shape with the dtype that the checkpoint names for states. If it names none, they are float32."""
    for key in _DTYPE_KEYS:
        if (value := settings.get(key)) is not None and value != "auto":
            dtype = str(value).removeprefix("torch.")
            if dtype not in DTYPES:
                raise ValueError(
                    f"{settings.source}: {key} {value!r} is not supported ({', '.join(DTYPES)} are)"
                )
            return replace(shape, dtype=dtype, says_dtype=True)
    return shape


def chosen_dtype(shape: StateConfig | None, chosen: str, model: str) -> StateConfig | None:
    """The shape with the dtype of `--advanced.state-dtype`. auto: unchanged. Raises `ValueError` if there are
    no states."""
    if chosen == "auto":
        return shape
    if shape is None or not shape.state_size:
        raise ValueError(f"--advanced.state-dtype {chosen}: heads of {model} have no states; leave it out")
    return replace(shape, dtype=chosen, says_dtype=True)


def state_layers(settings: Settings, count: int) -> tuple[int, ...]:
    source = settings.source
    kinds = settings.get("layer_types") or settings.get("layers_block_type")
    if kinds is None:
        attention = settings.get("attn_layer_indices") or []
        if not isinstance(attention, list):
            raise ValueError(f"{source}: attn_layer_indices must be a list, not {attention!r}")
        kinds = ["attention" if layer in attention else "mamba" for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ValueError(f"{source}: layer_types must name the type of each of the {count} layers")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"{source}: layer type {kind!r} is not supported ({', '.join(KINDS)} are)")
    layers = tuple(layer for layer, kind in enumerate(kinds) if KINDS[kind])
    if len(layers) in (0, count):
        raise ValueError(f"{source}: a model needs layers with states and layers with attention")
    return layers


def _number(limit: Any, source: str) -> float:
    if isinstance(limit, Mapping):  # how transformers 5 writes infinity
        limit = limit.get("__float__")
    try:
        return float(limit)
    except (TypeError, ValueError):
        raise ValueError(f"{source}: time_step_limit must be two numbers, not {limit!r}") from None
