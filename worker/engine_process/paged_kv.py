"""The KV cache and the states of an engine, or of another rank, as KV transfer sees them."""

from collections.abc import Callable
from dataclasses import replace

import torch

from baton.engine import Engine
from baton.engine.execution.rank import Follower
from baton.engine.kernels import parts
from baton.engine.model_config import ModelConfig
from baton.engine.models import attention_caches, state_caches
from baton.engine.models.cache_spec import StateCache
from baton.kv_transfer import KVLayout, PagedKV, StateType


def paged_kv(engine: Engine | Follower, layers_ready: Callable[[], int] = lambda: 0) -> PagedKV:
    """Returns the KV cache for a KV sender, a KV receiver or a `RankCopier`.

    A sender of several ranks needs `layers_ready`, as in `PagedKV`.
    """
    values, scales = zip(*map(parts, engine.kv_cache), strict=True)
    ranks, device = engine.ranks, str(values[0].device)
    return PagedKV(
        values,
        engine.block_size,
        kv_layout(engine),
        device,
        ranks.rank,
        ranks.size,
        layers_ready,
        [scale for scale in scales if scale is not None],
        _states(engine),
    )


def kv_layout(engine: Engine | Follower) -> KVLayout:
    """Returns the layout of the KV on the wire, with the KV heads of all ranks, and of the states.

    It requires that all attention layers cache alike, and all state layers. Spans of attention may differ:
    all tokens are sent.
    """
    caches = engine.cache_spec
    layer, *others = (replace(layer, span=None) for layer in attention_caches(caches))
    assert all(other == layer for other in others), "the wire has one layout for all layers"
    states = set(state_caches(caches))
    assert len(states) <= 1, "the wire has one layout for all layers"
    return KVLayout(
        len(caches),
        engine.model_config.num_kv_heads,
        layer.head_dim,
        _name(layer.dtype),
        _state_types(engine.model_config, *states) if states else (),
        tuple(i for i, layer in enumerate(caches) if isinstance(layer, StateCache)),
    )


def _state_types(model: ModelConfig, cache: StateCache) -> tuple[StateType, ...]:
    """The states of a Mamba-2 layer: the last inputs of the convolution, which has the channels x, B and C,
    and the state of each head. B and C belong to groups of heads."""
    state, dtype = model.state, _name(cache.dtype)
    assert state is not None, "it has state layers"
    return (
        StateType("x", cache.conv_inputs, state.num_heads, cache.head_dim, dtype),
        StateType("B", cache.conv_inputs, state.groups, cache.state_size, dtype),
        StateType("C", cache.conv_inputs, state.groups, cache.state_size, dtype),
        StateType("ssm", 1, state.num_heads, cache.head_dim * cache.state_size, "float32"),
    )


def _states(engine: Engine | Follower) -> list[list[torch.Tensor]]:
    """As `PagedKV.states`, in the order of `_state_types`."""
    of_layers = []
    for cache, state in zip(state_caches(engine.cache_spec), engine.states, strict=True):
        inner, of_groups = cache.num_heads * cache.head_dim, cache.channels - cache.num_heads * cache.head_dim
        parts = state.conv.split((inner, of_groups // 2, of_groups // 2), dim=2)
        sizes = cache.head_dim, cache.state_size, cache.state_size
        conv = [part.unflatten(2, (-1, size)) for part, size in zip(parts, sizes, strict=True)]
        of_layers.append([*conv, state.ssm.flatten(2)[:, None]])
    return [list(layers) for layers in zip(*of_layers, strict=True)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
