"""Which held prefills to give up so that one whose FETCH has arrived can be computed.

Whoever holds room on a decode worker must always be prefilled, or prefill and decode would wait for each
other.
"""

from collections.abc import Callable, Mapping, Set
from typing import Protocol


class Pool(Protocol):
    block_size: int

    @property
    def blocks_free(self) -> int: ...

    @property
    def blocks_leaving(self) -> int:
        """That will be free without anybody's doing."""
        ...


class Prefill(Protocol):
    tokens: int
    rank: tuple[int, bool]
    held: bool
    closed: bool


def prefills_to_drop(
    pool: Pool,
    prefills: Mapping[bytes, Prefill],
    started: Set[bytes],
    has_fetch: Callable[[bytes], bool],
) -> list[bytes]:
    """Held prefills without a FETCH, oldest first, as many as the first waiting prefill with a FETCH lacks
    blocks.

    Args:
        prefills: in order of arrival.
        started: those that have blocks already.
        has_fetch: whether a decode worker has asked for a prefill.
    """
    lacking = -pool.blocks_free - pool.blocks_leaving
    # Stable: equal ranks stay in order of arrival, as in the engine's queue.
    waiting = [item for item in prefills.items() if item[0] not in started and not item[1].closed]
    for prefill_id, prefill in sorted(waiting, key=lambda item: item[1].rank):
        # Those that wait before it are served before it.
        lacking += _blocks(prefill, pool)
        if has_fetch(prefill_id):
            break
    else:
        return []
    dropped: list[bytes] = []
    for prefill_id, prefill in prefills.items():
        if lacking <= 0:
            break
        if prefill.closed:
            if prefill_id in started:
                lacking -= _blocks(prefill, pool)  # comes back by itself, soon
        elif prefill.held and not has_fetch(prefill_id):
            lacking -= _blocks(prefill, pool)
            dropped.append(prefill_id)
    return dropped


def _blocks(prefill: Prefill, pool: Pool) -> int:
    return -(-prefill.tokens // pool.block_size)
