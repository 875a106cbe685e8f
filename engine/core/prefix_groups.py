"""Which requests of a step read the KV of a common prefix together. Pure.

Requests whose block tables begin with the same blocks share these by the prefix cache: a system prompt, or
the turns of one conversation. Attention can read them once for several requests (`kernels.attention.pieces`).

The tables of a step form a tree, in which a node is a prefix of all requests below it. Groups do not overlap,
so each node has a choice: one group here, with all its requests, or the groups of its children, which have
longer prefixes and fewer requests. What saves more bytes wins.

Successive steps mostly decode the same requests, whose prefixes do not change: they only append blocks. A
request that loses its blocks computes them anew as a prompt, in a step between. So `PrefixGroups` looks at
the tables only when other requests decode.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from baton.engine.step import PrefixReads

DEEPEST = 4
"""Nodes on a path of the tree that are looked at. A client may make a path as long as there are requests."""


class Group(NamedTuple):
    """Requests that read a prefix together."""

    rows: Sequence[int]
    """Their indices."""
    blocks: int
    """Of the prefix."""


class PrefixGroups:
    """The groups of the steps of an engine.

    Attributes:
        reads: as in `PrefixReads`.
    """

    def __init__(self, block_size: int, reads: PrefixReads) -> None:
        self.reads = reads
        self._block_size = block_size
        self._requests: Sequence[object] = ()
        self._groups: Sequence[Group] = ()

    def of(
        self, requests: Sequence[object], tables: Sequence["array[int]"], written: Sequence[int]
    ) -> Sequence[Group]:
        """The groups among the requests that decode, which have these block tables. Each writes from position
        `written` on, and no group has the block of it."""
        if requests != self._requests:
            self._requests = requests
            self._groups = prefix_groups(tables, written, self._block_size, self.reads)
        return self._groups

    def saved(self, groups: Sequence[Group]) -> int:
        """How many positions fewer a step reads with these groups."""
        return sum(self.reads.positions(len(rows), blocks * self._block_size) for rows, blocks in groups)


def prefix_groups(
    tables: Sequence["array[int]"], written: Sequence[int], block_size: int, reads: PrefixReads
) -> list[Group]:
    """As `PrefixGroups.of`."""
    by_first: dict[int, list[int]] = {}
    for row, table in enumerate(tables):
        by_first.setdefault(table[0], []).append(row)
    nodes = [rows for rows in by_first.values() if len(rows) > 1]
    if not nodes:
        return []
    whole = [position // block_size for position in written]
    return [group for rows in nodes for group in _best(rows, tables, whole, block_size, reads, DEEPEST)[1]]


def _best(
    rows: Sequence[int],
    tables: Sequence["array[int]"],
    whole: Sequence[int],
    block_size: int,
    reads: PrefixReads,
    depth: int,
) -> tuple[float, list[Group]]:
    """What the groups of these requests save, and the groups. `whole`: blocks of each request before the one
    that it writes. `depth`: nodes that are looked at from here on."""
    most = min(whole[row] for row in rows)
    # Two of them are often enough to know the prefix. The others confirm it.
    blocks = _same(np.array((tables[rows[0]][:most], tables[rows[-1]][:most])))
    if len(rows) > 2:
        flat = np.frombuffer(b"".join([tables[row][:blocks] for row in rows]), np.int32)
        blocks = _same(flat.reshape(len(rows), blocks))
    best = max(0.0, reads.saved(len(rows), blocks * block_size)), [Group(rows, blocks)]
    if not best[0]:
        best = 0.0, []
    if depth > 1:
        children = _children(rows, tables, whole, blocks).values()
        found = [_best(child, tables, whole, block_size, reads, depth - 1) for child in children]
        below = sum(saved for saved, _ in found)
        if below > best[0]:
            best = below, [group for _, groups in found for group in groups]
    return best


def _same(tables: np.ndarray) -> int:
    """With how many equal columns the tables begin."""
    differ = (tables != tables[0]).any(axis=0)
    return int(differ.argmax()) if differ.any() else tables.shape[1]


def _children(
    rows: Sequence[int], tables: Sequence["array[int]"], whole: Sequence[int], blocks: int
) -> Mapping[int, Sequence[int]]:
    """The requests that share one more block than all of these do, by this block."""
    by_next: dict[int, list[int]] = {}
    for row in rows:
        if whole[row] > blocks:
            by_next.setdefault(tables[row][blocks], []).append(row)
    return {block: child for block, child in by_next.items() if len(child) > 1}
