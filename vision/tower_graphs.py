"""CUDA graphs of a tower: a launch for each layer, where there are twenty without them.

The encoder and the engine are threads of one Python process. Each launch of the encoder may wait for Python's
lock, so beside a busy engine they take longer than the device takes to compute the image.

    an image of a size ──▶ launched: kernels are compiled and chosen
    the second one     ──▶ launched, captured with a graph for each layer, and replayed
    all later ones     ──▶ replayed, if the second one had the same bytes both times

A library may choose another kernel while it is captured. Then no size has graphs: the bytes of an image do
not depend on what was encoded before.

All that a pass reads beside weights and pixels depends on the size of the image alone. So the pixels are the
only input of its graphs. Weights may change in place.

All graphs share one memory pool and one output, since only one image is computed at a time.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)

MOST_SIZES = 24
"""That have graphs. Graphs of 27 layers take some MB of the device beside the memory that all share."""
MOST_SEEN = 64
"""Sizes that are remembered, and have no graphs yet."""

Size = tuple[int, int]
"""Rows and columns of tokens."""
Pass = Callable[[Tensor, Callable[[], None]], Tensor]
"""The pass of a tower for one size: (pixels, what to call before each layer) → [tokens, bytes] uint8. The
pixels are flat, uint8, on the host or on the device."""


class Graph(Protocol):
    def replay(self) -> None:
        """Launches it on the current stream."""


Capture = Callable[[Callable[[Callable[[int], Any]], None]], Sequence[Graph]]
"""Captures what a function launches on the current stream. Where the function calls its argument, a graph
ends and another begins. The same kernels have run on this stream before."""


class TowerGraphs:
    """The graphs of one tower. Used by the thread of the tower, on the stream of the tower."""

    def __init__(
        self, new_pool: Callable[[], Capture], most_tokens: int, pixel_bytes: int, device: torch.device
    ) -> None:
        """`new_pool`: makes a capture with a memory pool of its own. `most_tokens`: of an image that gets
        graphs; larger ones keep the device busy for longer than their launches take. `pixel_bytes`: of the
        pixels of one token."""
        self._new_pool = new_pool
        self._most_tokens, self._pixel_bytes = most_tokens, pixel_bytes
        self._device = device
        self._capture: Capture | None = None
        self._pixels = self._output = torch.empty(0, dtype=torch.uint8)
        self._replays: dict[Size, _Replay] = {}
        self._seen = OrderedDict[Size, int]()  # bytes of a token in the output
        self._failed = False

    def pass_of(self, size: Size, launched: Pass) -> Pass:
        """What computes the next image of this size: `launched`, or graphs of it."""
        if (replay := self._replays.get(size)) is not None:
            return replay
        if self._failed or size[0] * size[1] > self._most_tokens:
            return launched
        return partial(self._second if size in self._seen else self._first, size, launched)

    def drop(self) -> None:
        """Gives back the memory of all graphs. Dropped one by one, each would free memory of cuBLAS that the
        others of this stream still use (pytorch/pytorch#193402)."""
        if self._capture is None:
            return
        self._replays.clear()
        self._capture = None
        self._pixels = self._output = torch.empty(0, dtype=torch.uint8)
        torch.cuda.empty_cache()

    def _first(self, size: Size, launched: Pass, pixels: Tensor, before_layer: Callable[[], None]) -> Tensor:
        packed = launched(pixels, before_layer)
        self._seen[size] = packed.shape[1]
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return packed

    def _second(self, size: Size, launched: Pass, pixels: Tensor, before_layer: Callable[[], None]) -> Tensor:
        packed = launched(pixels, before_layer)
        try:
            replay = self._captured(size, launched)
        except RuntimeError as error:
            self._fail(f"they cannot be captured: {error}")
        else:
            if not torch.equal(replay(pixels, before_layer), packed):
                self._fail("they round in another way")
        return packed

    def _fail(self, reason: str) -> None:
        self._failed = True
        self.drop()
        log.warning("images are encoded without CUDA graphs: %s", reason)

    def _captured(self, size: Size, launched: Pass) -> "_Replay":
        if len(self._replays) == MOST_SIZES:
            self.drop()
        tokens, token_bytes = size[0] * size[1], self._seen.pop(size)
        if self._capture is None:
            self._capture = self._new_pool()
            memory = partial(torch.empty, dtype=torch.uint8, device=self._device)
            self._pixels = memory(self._most_tokens * self._pixel_bytes)
            self._output = memory((self._most_tokens, token_bytes))
        pixels, output = self._pixels[: tokens * self._pixel_bytes], self._output[:tokens]

        def work(cut: Callable[[int], Any]) -> None:
            output.copy_(launched(pixels, lambda: cut(0)))

        replay = self._replays[size] = _Replay(self._capture(work), launched, pixels, output)
        return replay


class _Replay(NamedTuple):
    """A pass that graphs replay."""

    graphs: Sequence[Graph]
    """The part before the first layer, and then each layer. The last one has what follows the layers."""
    launched: Pass
    """It owns what the graphs read of this size."""
    pixels: Tensor
    output: Tensor
    """Valid until the next pass of any size."""

    def __call__(self, pixels: Tensor, before_layer: Callable[[], None]) -> Tensor:
        self.pixels.copy_(pixels, non_blocking=True)
        first, *layers = self.graphs
        first.replay()
        for layer in layers:
            before_layer()
            layer.replay()
        return self.output
