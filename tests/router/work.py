"""How much work code does: unlike its time, the same on every machine."""

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

_SMALL = 1000
"""Bytes that any line may allocate, for objects of its own."""


def work(run: Callable[[], object]) -> int:
    """Lines of Python that it runs, and bytes that each of them allocates at once beyond `_SMALL`. So a
    text that is copied or joined again for each of its characters counts as much as a loop over it."""
    lines = copied = 0
    before = 0

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines, copied, before
        now, most = tracemalloc.get_traced_memory()
        lines, copied, before = lines + 1, copied + max(0, most - before - _SMALL), now
        tracemalloc.reset_peak()
        return look

    tracer = sys.gettrace()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    sys.settrace(look)
    try:
        run()
    finally:
        sys.settrace(tracer)
        tracemalloc.stop()
    return lines + copied
