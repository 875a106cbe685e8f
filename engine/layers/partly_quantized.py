"""Products of one input, of which a checkpoint may have some quantized and some plain."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from baton.engine.kernels import Both, LinearMethod
from baton.engine.layers.ranks import Shard
from baton.engine.layers.weights import Weights


class PartlyQuantized(LinearMethod):
    """Two products of one input, of which a checkpoint has the second plain. Gives both results."""

    takes_both = True

    def __init__(self, wide: LinearMethod, narrow: LinearMethod) -> None:
        self.wide = wide
        self.narrow = narrow

    def quantizes(self, rows: int) -> bool | None:
        return self.wide.quantizes(rows)

    def __call__(self, x: Tensor | Both) -> Any:
        plain, inputs = x if isinstance(x, Both) else (x, x)
        return self.wide(inputs), self.narrow(plain)


def product(
    weights: Weights,
    name: str,
    wide: Sequence[tuple[str, Shard]],
    narrow: Sequence[tuple[str, Shard]],
    columns: Shard,
    *,
    bias: bool,
) -> LinearMethod:
    """The product of all parts, with their rows; equal names are one weight. It is `PartlyQuantized` if only
    some are quantized."""
    parts = [[(f"{name}.{part}", rows) for part, rows in of] for of in (wide, narrow)]
    names = [part for of in parts for part, _ in of]
    if len({*names}) == 1:
        rows = side_by_side(*(rows for of in parts for _, rows in of))
        return weights.linear(names, rows, columns, bias=bias)
    if weights.format.alike(weights, names):
        return weights.linear(names, [rows for of in parts for _, rows in of], columns, bias=bias)
    both = [
        weights.linear([part for part, _ in of], [rows for _, rows in of], columns, bias=bias) for of in parts
    ]
    return PartlyQuantized(*both)


def side_by_side(*parts: Shard) -> list[Shard]:
    """The parts of one dimension that has the dimensions of all these parts side by side."""
    size = sum(part.size for part in parts)
    starts = [sum(part.size for part in parts[:i]) for i in range(len(parts))]
    return [
        Shard(start + part.start, start + part.stop, size) for start, part in zip(starts, parts, strict=True)
    ]
