"""Which adapters (LoRA) vLLM has on the device, and how long it takes to move one there.

vLLM has `--max-loras` slots for them, keeps those that were used last, and does not say which. Another one
comes from the memory of the host between two steps: all requests of the worker wait meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm.lora.model_manager import LRUCacheLoRAModelManager


def watch(moved: Callable[[list[int], float], object]) -> None:
    """Calls `moved` when vLLM has moved an adapter to the device: with the numbers of all that are there now,
    and the seconds of the move. In the process with the model."""
    activate = LRUCacheLoRAModelManager.activate_adapter

    def timed(manager: LRUCacheLoRAModelManager, number: int) -> bool:
        began = time.monotonic()
        is_new = activate(manager, number)
        if is_new:
            there = [each for each in manager.lora_index_to_id if each is not None]
            moved(there, time.monotonic() - began)
        return is_new

    LRUCacheLoRAModelManager.activate_adapter = timed
