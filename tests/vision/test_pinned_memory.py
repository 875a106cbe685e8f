"""Memory of embeddings is taken from the system once."""

import gc

import numpy as np
import torch

from baton.vision.pinned_memory import ALIGNMENT, PinnedMemory
from tests.device import DEVICE


def test_a_part_is_given_back_when_no_view_of_it_is_left() -> None:
    memory = PinnedMemory(4 * ALIGNMENT, pinned=DEVICE == "cuda")
    first, second = memory.take(ALIGNMENT), memory.take(2 * ALIGNMENT - 1)
    view = torch.from_numpy(second.reshape(-1, 1)[5:]).view(torch.int8)
    first[:], second[:] = 1, 2
    del first, second
    gc.collect()
    assert memory.free_bytes == 2 * ALIGNMENT, "the second part is still seen"
    other = memory.take(2 * ALIGNMENT)
    other[:] = 3
    assert memory.free_bytes == 2 * ALIGNMENT, "there was no part of this size"
    assert view.unique().tolist() == [2]
    del view
    gc.collect()
    assert memory.free_bytes == 4 * ALIGNMENT
    whole = memory.take(4 * ALIGNMENT)  # parts that lie side by side are one
    assert memory.free_bytes == 0
    written = 3 * ALIGNMENT - 1
    assert whole.tobytes()[:written] == bytes([1]) * ALIGNMENT + bytes([2]) * (2 * ALIGNMENT - 1)


def test_parts_outlive_the_object_that_gave_them() -> None:
    part = PinnedMemory(ALIGNMENT, pinned=DEVICE == "cuda").take(8)
    gc.collect()
    part[:] = np.arange(8)
    assert part.tolist() == list(range(8))
