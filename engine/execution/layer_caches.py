"""What the layers of a model cache on one device."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.engine.execution.elastic_cache import ElasticCache
from baton.engine.models.cache_spec import (
    CacheMemory,
    CacheSpec,
    DeviceTensors,
    Places,
    SharedCache,
)


class LayerCaches:
    """The caches of all layers, and the states of requests among them.

    Attributes:
        of_layers: what each layer caches, as its `CacheSpec` allocates it. Empty until `open`.
        sources: of each layer, the layer that keeps the cache it reads.
        has_states: whether layers keep something of requests.
        window_blocks: blocks of layers with windows. None: these have no blocks of their own.
        table_width: of the block tables. None: as many blocks as a step needs.
    """

    def __init__(
        self, specs: Sequence[CacheSpec], *, block_size: int, max_model_len: int, device: torch.device
    ) -> None:
        self.of_layers: list[Any] = []
        self.sources = [
            spec.source if isinstance(spec, SharedCache) else layer for layer, spec in enumerate(specs)
        ]
        self.has_states = any(not array.per_token for spec in specs for array in spec.arrays)
        self.window_blocks: int | None = None
        self.table_width: int | None = None
        self._specs = specs
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._device = device
        self._elastic: ElasticCache | None = None
        self._slots: list[list[Tensor]] = []
        """The tensors [slots, …] of all arrays of requests, those of one dtype together."""

    def open(
        self,
        num_blocks: int,
        num_slots: int = 0,
        *,
        window_blocks: int | None = None,
        memory: CacheMemory | None = None,
        shared: bool = False,
    ) -> None:
        """Makes an empty cache. `num_slots`: states of requests, and copies of them; 0: no layer has states.
        `window_blocks`: as in `Places`. `memory`: None: torch has it. `shared`: all layers with the same
        arrays share the memory of one."""
        self._elastic = memory if isinstance(memory, ElasticCache) else None
        memory = memory or DeviceTensors(self._device)
        places = Places(num_blocks, self._block_size, num_slots, window_blocks)
        alike = dict[Any, Any]()
        self.window_blocks = window_blocks
        if self._device.type == "cuda":
            # One width: Triton compiles a kernel anew for strides that differ in their divisibility.
            width = -(-self._max_model_len // (16 * self._block_size)) * 16
            self.table_width = width if window_blocks is None else 2 * width
        self.of_layers = []
        for layer, spec in enumerate(self._specs):
            key = spec.arrays if shared else layer
            if key not in alike:
                alike[key] = spec.allocate(places, memory)
            self.of_layers.append(alike[key])
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for spec, cache in zip(self._specs, self.of_layers, strict=True):
            slots = spec.slots(cache)
            each = sum(array.bytes for array in spec.arrays if not array.per_token)
            assert sum(x.nbytes for x in slots) == num_slots * each, "copies have all arrays of a request"
            for x in slots:
                by_dtype[x.dtype].append(x)
        self._slots = list(by_dtype.values())
        if self._elastic is not None:
            self._elastic.map_present()

    def move(self, moves: Sequence[tuple[int, int, bool]]) -> None:
        """Makes these moves of memory (`engine.core.elastic.Move`). No step and no copy uses what loses its
        memory."""
        assert self._elastic is not None, "the cache has memory that moves"
        self._elastic.move(moves)

    def close(self) -> None:
        """Gives the memory back."""
        self.of_layers, self._slots = [], []

    def copy_states(self, slots: np.ndarray) -> None:
        """Enqueues copies of what all layers keep of requests, each from a slot to another, in a launch for
        each dtype."""
        pairs = slots.tolist()
        for states in self._slots:
            targets = [state[to] for state in states for _, to in pairs]
            torch._foreach_copy_(targets, [state[source] for state in states for source, _ in pairs])
