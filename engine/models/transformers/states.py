"""States of modules that transformers keeps in its cache: linear attention, Mamba, convolutions.

The module of a layer takes a cache object. Here it gets one with the states of some requests, which it
changes. It computes all requests that decode as one batch, and each prompt by itself.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from baton.engine.kernels.state.by_request import Advance
from baton.engine.model_config import ModuleIndex, ModuleState, ModuleStates
from baton.engine.models.transformers.interface import Calls, current_pass

MixModules = Callable[[int, Advance], None]
"""(layer, what computes rows of it). Takes the states of the layer past the tokens of the step."""


class Held(Cache):
    """A cache for modules whose keys and values Baton's attention keeps."""

    def __init__(self, layers: Mapping[int, LinearAttentionLayer]) -> None:
        super().__init__(layers=[layers.get(i) or LinearAttentionLayer() for i in range(max(layers) + 1)])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def held(kept: ModuleStates, states: Sequence[Tensor] | None) -> Held:
    """A cache with the states [requests, …] of one module. None: of a request that begins."""
    layer = LinearAttentionLayer(number_of_states=1 + max(state.index for state in kept.states))
    for state, x in zip(kept.states, states or (), strict=states is not None):
        getattr(layer, state.name)[state.index] = x
        if state.name == "conv_states":
            layer.is_conv_states_initialized[state.index] = True
            layer.conv_kernel_size[state.index] = state.shape[-1]
        else:
            layer.is_recurrent_states_initialized[state.index] = True
        layer.has_previous_state[state.index] = True
        layer.dtype, layer.device = x.dtype, x.device
    return Held({kept.layer: layer})


class Stateful:
    """Takes the place of the function `forward` of a module with states."""

    def __init__(self, forward: Callable[..., Any], layer: int, kept: ModuleStates) -> None:
        self.forward, self.layer, self.kept = forward, layer, kept

    def __call__(self, *args: Any, **named: Any) -> Any:
        parts: list[tuple[Any, bool]] = []
        tokens = next(x.shape[1] for x in (*args, *named.values()) if isinstance(x, Tensor))

        def advance(rows: slice, states: Sequence[Tensor] | None, *, decodes: bool) -> Sequence[Tensor]:
            if states is not None and not decodes and not self.kept.goes_on:
                for row in range(rows.start, rows.stop):
                    states = compute(slice(row, row + 1), states, decodes=False)
                return states
            return compute(rows, states, decodes=decodes)

        def compute(rows: slice, states: Sequence[Tensor] | None, *, decodes: bool) -> Sequence[Tensor]:
            cache = held(self.kept, states)

            def cut(x: Any) -> Any:
                if isinstance(x, Cache):
                    return cache
                if isinstance(x, tuple | list):
                    return type(x)(map(cut, x))
                if not isinstance(x, Tensor) or x.shape[:2] != (1, tokens):
                    return x
                return x[:, rows].transpose(0, 1) if decodes else x[:, rows]

            made = self.forward(*map(cut, args), **{name: cut(x) for name, x in named.items()})
            parts.append((made, decodes))
            layer: Any = cache.layers[self.kept.layer]
            return [getattr(layer, state.name)[state.index] for state in self.kept.states]

        current_pass().mix(self.layer, advance)
        return _joined([made for made, _ in parts], [decodes for _, decodes in parts])


def _joined(made: Sequence[Any], decodes: Sequence[bool]) -> Any:
    """The results of all rows, in order."""
    if isinstance(made[0], tuple):
        return tuple(_joined(each, decodes) for each in zip(*made, strict=True))
    if not isinstance(made[0], Tensor):
        return made[0]
    rows = [x.transpose(0, 1) if of_many else x for x, of_many in zip(made, decodes, strict=True)]
    return torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]


def record_modules(whole: nn.Module, calls: Calls) -> None:
    """From now on a pass of `whole` adds to `calls` which modules it calls, and what they keep in the cache.
    Of modules within each other it is the innermost one that keeps it."""
    seen, attended = set[tuple[int, str, int]](), dict[str, list[int]]()

    def before(name: str) -> Callable[..., None]:
        return lambda *_: attended.setdefault(name, []).append(len(calls.attention))

    def after(name: str) -> Callable[..., None]:
        def find(module: nn.Module, args: Any, named: Any, _: Any) -> None:
            calls.called.add(name)
            first = attended[name].pop()
            for cache in (x for x in (*args, *named.values()) if isinstance(x, Cache)):
                for number, layer in enumerate(cache.layers):
                    if (keys := getattr(layer, "indexer_keys", None)) is not None:
                        index = number, "indexer_keys", 0
                        if index not in seen:
                            seen.add(index)
                            calls.layers.append(ModuleIndex(name, keys.shape[-1]))
                    if not (states := _new_states(layer, number, seen)):
                        continue
                    if len(calls.attention) > first:
                        raise ValueError(f"{type(module).__name__} attends, and keeps states beside keys")
                    calls.layers.append(ModuleStates(name, number, states))

        return find

    for name, module in whole.named_modules():
        module.register_forward_pre_hook(before(name))
        module.register_forward_hook(after(name), with_kwargs=True)


class _Watched(Tensor):
    """A tensor on the device "meta" that knows whether something is computed of its values."""

    is_read = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if not isinstance(result, Tensor) or func is Tensor.copy_:
            return result
        for x in args:
            for each in x if isinstance(x, tuple | list) else [x]:
                if isinstance(each, _Watched):
                    each.is_read = True
        return result.as_subclass(Tensor)


def watch_states(cache: Any, kept: Sequence[ModuleStates]) -> Callable[[], set[str]]:
    """From now on a pass with this cache shows which modules do not begin with their states. Returns what
    names them after the pass."""
    watched: list[tuple[str, _Watched]] = []
    for module in kept:
        for state in module.states:
            of_name = getattr(cache.layers[module.layer], state.name)
            of_name[state.index] = of_name[state.index].as_subclass(_Watched)
            watched.append((module.module, of_name[state.index]))
    return lambda: {name for name, x in watched if not x.is_read}


def _new_states(layer: Any, number: int, seen: set[tuple[int, str, int]]) -> tuple[ModuleState, ...]:
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return ()
    found = []
    for name in ("conv_states", "recurrent_states"):
        for index, x in getattr(layer, name).items():
            if x is not None and (number, name, index) not in seen:
                seen.add((number, name, index))
                found.append(ModuleState(name, index, tuple(x.shape[1:]), x.dtype is torch.float32))
    return tuple(found)
