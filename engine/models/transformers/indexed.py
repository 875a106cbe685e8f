"""Modules of transformers that choose the positions which a query sees: the index of DeepSeek-V3.2, and those
of models that have it from there.

Such a module takes a cache object. It adds keys of its tokens to that, and returns the positions with the
best scores. Here it computes request by request, and the paged cache keeps the keys.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.model_config import ModuleIndex
from baton.engine.models.transformers.interface import current_pass

Keep = Callable[[Tensor], Tensor]
"""Keeps the keys [1, tokens, head_dim] of some rows of a request. Returns all keys of it up to these."""
MixIndex = Callable[[int, Callable[[slice, int, Keep], None]], None]
"""(layer, what computes rows of a request from a position on). It computes all requests of a step."""


class Keys:
    """Takes the place of a cache."""

    def __init__(self, keep: Keep) -> None:
        self.keep = keep

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        return self.keep(keys)


class Mask:
    """Stands for a mask of all requests, which only an index reads. That gets the mask of each request."""

    def __getitem__(self, _: Any) -> "Mask":
        return self


class Indexed:
    """Takes the place of the function `forward` of a module with an index. Returns [1, tokens, positions]: of
    each token those that are chosen, then -1. Some may be behind its own."""

    def __init__(self, forward: Callable[..., Tensor], layer: int) -> None:
        self.forward, self.layer = forward, layer

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        made: list[Tensor] = []
        tokens, device = args[0].shape[1], args[0].device

        def choose(rows: slice, start: int, keep: Keep) -> None:
            stop = start + rows.stop - rows.start
            seen = torch.ones(rows.stop - rows.start, stop, dtype=torch.bool, device=device).tril_(start)

            def cut(x: Any) -> Any:
                if isinstance(x, Mask):
                    return seen[None]
                if isinstance(x, tuple | list):
                    return type(x)(map(cut, x))
                return x[:, rows] if isinstance(x, Tensor) and x.shape[:2] == (1, tokens) else x

            given = {name: cut(x) for name, x in named.items()} | {"past_key_values": Keys(keep)}
            made.append(self.forward(*map(cut, args), **given))

        current_pass().mix(self.layer, choose)
        width = max(x.shape[2] for x in made)
        return torch.cat([F.pad(x, (0, width - x.shape[2]), value=-1) for x in made], dim=1)


def keep_indexes(whole: Any, layers: Mapping[int, ModuleIndex]) -> dict[str, Any]:
    """Gives modules the keys of requests. Returns the arguments with which the model hands them masks."""
    for number, index in layers.items():
        module = whole.get_submodule(index.module)
        module.forward = Indexed(module.forward, number)
    masks: dict[str, Mask | None] = defaultdict(lambda: None, indexed_attention=Mask())
    return {"attention_mask": masks}
