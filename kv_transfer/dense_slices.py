"""Slices as the wire and the shared store have them (`layout`): arrays over the bytes of a slot. No torch."""

import numpy as np

from baton.kv_names.cache_kinds import FP8, ITEM_BYTES, SCALE_BYTES, CacheArray


def dense_planes(slot: memoryview, array: CacheArray, positions: int, heads: int) -> list[np.ndarray]:
    """A slice in a slot: values, and scales in FP8, each uint8 [rows, positions, heads, bytes of a head]."""
    shape, at, planes = (array.rows, positions, heads), 0, list[np.ndarray]()
    for size in (array.head_dim * ITEM_BYTES[array.dtype], *([SCALE_BYTES] if array.dtype == FP8 else [])):
        count = array.rows * positions * heads * size
        planes.append(np.frombuffer(slot, np.uint8, count, at).reshape(*shape, size))
        at += count
    return planes
