"""Heads with two rotated halves a and b that the checkpoint interleaves: (a0, b0, a1, b1, …).

The kernels rotate heads in the order (a0, a1, …, b0, b1, …). Query and key heads take this order when they
are read. Attention does not change, since it only needs their products.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from baton.engine.layers.ranks import Part


def read_halves(read: Callable[[Sequence[Part]], Tensor], parts: Sequence[Part], head_dim: int) -> Tensor:
    """These parts of the query's or key's projection. `read` reads parts of the stored tensor."""
    rows, *others = parts
    begin, end = rows.start // head_dim * head_dim, -(-rows.stop // head_dim) * head_dim
    heads = read([Part(begin, end, rows.size), *others])
    halves = heads.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(heads.shape)
    return halves[rows.start - begin : rows.stop - begin]
