"""Matrix products with a weight in the model's dtype."""

import ctypes
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels import LinearMethod
from baton.engine.kernels.blocks_of_rows import in_blocks, in_sizes


class PlainLinear(LinearMethod):
    """W in the model's dtype. A CPU keeps it in the blocked layout of oneDNN, which would otherwise rearrange
    it in every call: at small batches that takes longer than the product. A GPU has a kernel of its own for
    small batches."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, exact: bool = False) -> None:
        """`exact`: each row of a result has the same bits whatever the other rows."""
        self.packed = packs_plain(weight.dtype, weight.device)
        self.weight = _pack(weight) if self.packed else weight
        self.bias = bias
        self.product = _product(weight, bias, exact=exact) if weight.is_cuda else None
        self.most_rows = math.inf if exact else MAX_SKINNY_ROWS
        self.form = None if weight.is_cuda else in_blocks if exact else in_sizes

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in]. The kernels of a GPU read dense rows, so a CPU refuses others, too."""
        assert x.is_contiguous(), "a product takes dense rows"
        return self._multiply(x) if self.form is None else self.form(self._multiply, x)

    def _multiply(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        if self.product is not None and len(x) <= self.most_rows:
            return self.product(x)
        return F.linear(x, self.weight, self.bias)


def packs_plain(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and (
        dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)


def packed_memory(weight: Tensor) -> tuple[int, int]:
    """Address and bytes of a packed weight."""
    return torch.ops.mkldnn.data_ptr(weight), torch.ops.mkldnn._nbytes(weight)


def packed_at(address: int, weight: Tensor) -> Tensor:
    """A tensor packed as this weight over memory at another address, which must outlive the tensor."""
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
    layout = torch.ops.mkldnn._get_mkldnn_serialized_md(weight)
    dtype = getattr(torch_cpu, f"aoti_torch_dtype_{str(weight.dtype).removeprefix('torch.')}")()
    sizes, strides = ((ctypes.c_int64 * weight.dim())(*x) for x in (weight.shape, [0] * weight.dim()))
    handle = ctypes.c_void_p()
    error = torch_cpu.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(address),
        ctypes.c_int64(weight.dim()),
        sizes,
        strides,
        ctypes.c_int64(0),
        dtype,
        torch_cpu.aoti_torch_device_type_cpu(),
        0,
        ctypes.byref(handle),
        torch_cpu.aoti_torch_layout__mkldnn(),
        ctypes.c_void_p(layout.data_ptr()),
        ctypes.c_int64(layout.numel()),
    )
    assert not error, "torch has packed the weight in this layout"
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(handle, None, None))


def _product(weight: Tensor, bias: Tensor | None, *, exact: bool) -> Callable[[Tensor], Tensor] | None:
    from baton.engine.kernels.exact_linear import ExactLinear
    from baton.engine.kernels.launch import multiprocessors
    from baton.engine.kernels.skinny_linear import FewRowsLinear, SkinnyLinear

    if not SkinnyLinear.suits(weight):
        if exact:
            raise ValueError(
                f"--batch-invariant: no kernel multiplies {weight.dtype} with {weight.shape[1]} columns "
                "exactly on this GPU; use --dtype bfloat16 on Hopper or later, or leave the flag out"
            )
        return None
    return (ExactLinear if exact else FewRowsLinear)(weight, bias, multiprocessors(weight.device))


MAX_SKINNY_ROWS = 64
"""Rows of x on a GPU; cuBLAS is faster for more."""

PACKED_FOR_ROWS = 64
"""Rows of x that the layout is chosen for. Measured: it is good from 1 to 512."""
