"""Chooses the fastest of several kernels for a product, by measuring them on this device.

The steps before the first request meet all sizes, and measure each of them once. A file keeps the choices, so
the next engine on such a device measures nothing. A CUDA graph under capture cannot measure: without a choice
it takes the first kernel. The first should be the one that is known to be fast.
"""

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from baton.engine.kernels.launch import COMPILED

logger = logging.getLogger(__name__)

RUNS = 7
FLUSHED_BYTES = 64 << 20
"""More than the L2 cache holds: a step reads its weights from memory."""

LEAST_FLUSHES, MOST_FLUSHES = 16, 1024
CLEARLY = 0.95
"""Another kernel than the first is chosen if it takes at most this share of the time of the first."""

Kernel = Callable[[Any], Tensor]


def fastest(product: str, x: Any, rows: int, kernels: Mapping[str, Kernel]) -> Tensor:
    """The result of the fastest kernel for so many rows, up to a power of two. `product` names the kind and
    shape of the weights. All kernels give the same result, up to the order of a sum. Without a GPU: the
    result of the first."""
    choices = _choices()
    if choices is None:
        return next(iter(kernels.values()))(x)
    measures = not torch.cuda.is_current_stream_capturing()
    return choices.among(product, rows, x, kernels, measures=measures)(x)


class Choices:
    """The choices on one device, by product and rows."""

    def __init__(self, path: Path, seconds: Callable[[Kernel, Any], float]) -> None:
        """`path`: the file, which need not exist. `seconds`: measures a kernel."""
        self._path, self._seconds = path, seconds
        self._chosen = _read(path)

    def among(
        self, product: str, rows: int, x: Any, kernels: Mapping[str, Kernel], *, measures: bool = True
    ) -> Kernel:
        """`measures`: if nothing is known yet. Else it is the first."""
        name = f"{product} rows {triton.next_power_of_2(rows)}"
        chosen = self._chosen.get(name)
        if chosen in kernels:
            return kernels[chosen]
        if not measures:
            return next(iter(kernels.values()))
        taken = {kind: self._seconds(kernel, x) for kind, kernel in kernels.items()}
        first, best = next(iter(taken)), min(taken, key=taken.__getitem__)
        self._chosen[name] = best if taken[best] <= CLEARLY * taken[first] else first
        self._write()
        return kernels[self._chosen[name]]

    def _write(self) -> None:
        """Replaces the file as a whole. Engines that start at the same time measure for themselves."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
                json.dump({**_read(self._path), **self._chosen}, file, indent=1, sort_keys=True)
            os.replace(file.name, self._path)
        except OSError as error:
            logger.warning("the fastest kernels are measured at each start: %s", error)


def _read(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):  # none yet, or cut short
        return {}
    return {str(name): str(kind) for name, kind in content.items()} if isinstance(content, dict) else {}


@cache
def _choices() -> Choices | None:
    """Those on the GPU of this process."""
    if not COMPILED or not torch.cuda.is_available():
        return None
    versions = f"{torch.cuda.get_device_name()} torch {torch.__version__} triton {triton.__version__}"
    name = "".join(letter if letter.isalnum() or letter in ".+-" else "-" for letter in versions)
    return Choices(Path.home() / ".cache" / "baton" / f"fastest-{name}.json", seconds_of)


def seconds_of(kernel: Kernel, x: Any) -> float:
    """The least of several runs on the device. In a graph no kernel waits for the host, which takes longer to
    launch a kernel than the device to run it. So a run counts only if the host had launched all of it before
    the device began it, after flushes that keep the device busy."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    kernel(x)  # compiles
    flushes, taken = LEAST_FLUSHES, list[float]()
    while len(taken) < RUNS:
        for _ in range(flushes):
            flushed.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kernel(x)
        end.record()
        if begin.query() and flushes < MOST_FLUSHES:  # the device may have waited for the host
            flushes *= 2
            continue
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return min(taken)
