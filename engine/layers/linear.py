"""Matrix products with a weight in the model's dtype, and the base of all formats of weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels import Fp8Experts
from baton.engine.layers.ranks import Part
from baton.engine.layers.weights import LinearMethod, Weights


class PlainLinear(LinearMethod):
    """W in the model's dtype. A CPU keeps it in the blocked layout of oneDNN, which would otherwise rearrange
    it in every call: at small batches that takes longer than the product. A GPU has a kernel of its own for
    small batches."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.packed = _packs(weight.dtype, weight.device)
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS) if self.packed else weight
        )
        self.bias = bias
        self.skinny = _skinny(weight, bias) if weight.is_cuda else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        if self.skinny is not None and len(x) <= MAX_SKINNY_ROWS:
            return self.skinny(x)
        return F.linear(x, self.weight, self.bias)


OUTPUT = "lm_head"


@dataclass(frozen=True)
class PlainFormat:
    """How the matrices of a model are read, kept and multiplied: here in the model's dtype. Other formats
    derive from it, and leave to it what they do not quantize. One object serves all matrices of a model.

    `engine.loader.formats` chooses it. Embeddings and norms are not its concern."""

    name: str = "plain"
    """For logs and errors, such as "int4 in groups of 128"."""
    identity: str = ""
    """All that the format changes about results: a part of the model's fingerprint. Empty: nothing."""

    def bytes_per_parameter(self, dtype: torch.dtype, *, output: bool = False) -> float:
        """Memory for one parameter of a matrix, scales included. `dtype` is the model's. `output`: of an
        output projection that is not tied to the embedding."""
        return dtype.itemsize

    def linear(
        self, weights: Weights, names: Sequence[str], rows: Sequence[Part], columns: Part, *, bias: bool
    ) -> LinearMethod:
        """Loads several projections of the same input as one: weight i has rows[i] × columns, and all rows
        are stacked. With a part of the columns, the result is a term of a sum over ranks; the first rank's
        term has the bias. Tensors come from `weights.stack` and `weights.stored`, and may be on the device
        "meta". Raises `ValueError` naming file and tensor, also if the parts cut a group or block."""
        weight = weights.stack(
            [f"{name}.weight" for name in names],
            [(part, columns) for part in rows],
            scratch=_packs(weights.dtype, weights.device),
        )
        return PlainLinear(weight, weights.bias(names, rows, columns) if bias else None)

    def experts(
        self, weights: Weights, names: Sequence[Sequence[str]], rows: Sequence[Part], columns: Part
    ) -> Tensor | Fp8Experts:
        """Loads projections of the same input for several experts: names[i] are those of expert i, each with
        rows[i] × columns. Experts without rows are not on this rank. Returns [experts, out, in]. Raises
        `ValueError` as `linear` does, also if the format has no kernel for experts."""
        stacked = weights.stack(
            [f"{name}.weight" for expert in names for name in expert],
            [(part, columns) for expert, part in zip(names, rows, strict=True) for _ in expert],
        )
        return stacked.unflatten(0, (sum(part.length > 0 for part in rows), -1))

    def tied(self, weights: Weights, name: str, rows: Part, columns: Part, embedding: Tensor) -> LinearMethod:
        """The output projection of a model that has no other one than its input embedding. `embedding` has
        these rows and columns of `name`, in the model's dtype."""
        return PlainLinear(embedding)


def _packs(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and (
        dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _skinny(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    from baton.engine.kernels.launch import multiprocessors
    from baton.engine.kernels.skinny_linear import SkinnyLinear

    if not SkinnyLinear.suits(weight):
        return None
    return SkinnyLinear(weight, bias, multiprocessors(weight.device))


MAX_SKINNY_ROWS = 64
"""Rows of x on a GPU; cuBLAS is faster for more."""

PACKED_FOR_ROWS = 64
"""Rows of x that the layout is chosen for. Measured: it is good from 1 to 512."""
