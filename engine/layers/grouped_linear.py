"""Matrix products with `Groups`.

CPU, bfloat16     decodes    torch's kernel for 4 bits, which computes a row in the same way among any rows
                  prompts    oneDNN, from a copy in bfloat16 or float32, in tiles of equally many rows
GPU, 16 bits      4 bits     kernels that read the codes, from Hopper on (`quantized.int4_linear`)
                  experts    the grouped form of these kernels (`moe.grouped_linear`)
                  8 bits     dequantized at load if that leaves room for KV (`execution.cache_limits`); else
                             few rows as before (`quantized.int8_linear`), many dequantized for each product
other             dequantized at load; also on a CPU in the exact mode, since both kernels of a CPU would have
                  to add in one order
"""

import functools
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels import FourBits, Fp8Experts, Kernels, LinearMethod, from_hopper_on
from baton.engine.kernels.quantized.reference import four_bits, of_experts
from baton.engine.layers.current_step import current_step
from baton.engine.layers.linear import PlainLinear
from baton.engine.layers.weights import OUTPUT, Groups, PlainFormat, Stack, Weights, stacked

MOST_DECODES = 8
"""Rows that the kernel for 4 bits computes. Measured: oneDNN is faster for more, since it uses the matrix
unit of the CPU."""

TILE = 128
"""Rows of a product with oneDNN. It sums in another order for other numbers of rows."""

GROUP_SIZES = (32, 64, 128, 256)
"""What torch's kernel for 4 bits supports."""

GROUP_SIZES_ON_GPU = {4: (32, 64, 128), 8: (32, 64, 128, 256, 512, 1024)}
"""By the bits of integers."""

FLOAT_SIZES_ON_GPU = (16, 32)


@dataclass(frozen=True, kw_only=True)
class GroupsFormat(PlainFormat):
    """The base of formats that read matrices as `Groups`."""

    device: torch.device
    int8_packed: bool = True
    """Whether a GPU keeps integers of 8 bits packed."""

    @property
    def has_int8(self) -> bool:
        """Whether some products have integers of 8 bits."""
        return False

    def with_int8_dequantized(self) -> PlainFormat:
        if not self.has_int8:
            return self
        return replace(self, name=f"{self.name}, 8 bits dequantized at load", int8_packed=False)

    def kept_bytes(
        self, bits: int, size: int | None, dtype: torch.dtype, *, experts: bool, floats: bool = False
    ) -> float:
        """Bytes of one parameter in memory. Experts stay packed on GPUs alone, and in 4 bits."""
        on_gpu = self.device.type == "cuda"
        packed = bits == 4 or self.int8_packed
        if (experts and (bits == 8 or not on_gpu)) or (on_gpu and not packed):
            return dtype.itemsize
        return bytes_per_parameter(bits, size, dtype, self.device, floats=floats)

    def linear(self, weights: Weights, stack: Stack) -> LinearMethod:
        groups = self.read_groups(weights, stack)
        return super().linear(weights, stack) if groups is None else self.product(groups, weights, stack)

    def product(self, groups: Groups, weights: Weights, stack: Stack) -> LinearMethod:
        bias = weights.bias(stack)
        if groups.bits == 8 and not self.int8_packed:
            return PlainLinear(groups.values().to(weights.dtype), bias, exact=weights.kernels.exact)
        return grouped_linear(groups, bias, weights, output=stack.names == [OUTPUT])

    def experts(self, weights: Weights, experts: Sequence[Stack]) -> Tensor | Fp8Experts | FourBits:
        held: list[Tensor | FourBits] = []
        for stack in experts:
            groups = self.read_groups(weights, stack)
            expert: Tensor | FourBits
            if groups is None:
                expert = self.dense(weights, stack)
            elif groups.bits == 4 and _packs_on_gpu(groups, weights):
                expert = four_bits(*groups[:3], weights.dtype, floats=groups.floats)
            else:
                expert = groups.values().to(weights.dtype)
            if stack.rows[0].length:  # else another rank has this expert
                held.append(expert)
        packed = [expert for expert in held if isinstance(expert, FourBits)]
        if len(packed) == len(held):
            return of_experts(packed)
        # With `desc_act` the columns of some experts may be in order. One product takes all in one form.
        return torch.stack([x if isinstance(x, Tensor) else x.exact().to(weights.dtype) for x in held])

    def read_groups(self, weights: Weights, stack: Stack) -> Groups | None:
        """The rows of all projections. None: they are plain. Raises `ValueError` as `linear` does."""
        parts = [weights.groups(name, part) for name, part in zip(*stack.weights, strict=True)]
        read = [part for part in parts if part is not None]
        return stacked(read) if len(read) == len(parts) else None


def packs(bits: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products read packed weights of 4 or 8 bits. Else they are dequantized at load."""
    if device.type == "cuda":
        return dtype is not torch.float32 and from_hopper_on(device)
    return device.type == "cpu" and dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def bytes_per_parameter(
    bits: int, size: int | None, dtype: torch.dtype, device: torch.device, *, floats: bool = False
) -> float:
    """Bytes of one parameter in memory, the copy for prompts included. `size`: None if a group is a row."""
    on_gpu = device.type == "cuda"
    fits = _fits_gpu(bits, size, floats=floats) if on_gpu else size in GROUP_SIZES and not floats
    if not packs(bits, dtype, device) or not fits:
        return dtype.itemsize
    packed = bits / 4 * (1 / 2 + (4 / size if size else 0))  # scales and zeros have as many bits
    return packed if on_gpu else packed + dtype_of_prompts().itemsize


def _fits_gpu(bits: int, size: int | None, *, floats: bool) -> bool:
    """Whether kernels take groups of so many columns. None: of all columns."""
    if size is None:
        return bits == 8
    return size in (FLOAT_SIZES_ON_GPU if floats else GROUP_SIZES_ON_GPU[bits])


def grouped_linear(
    groups: Groups, bias: Tensor | None, weights: Weights, *, output: bool = False
) -> LinearMethod:
    """The product with these weights. `output`: it gives the logits, so it gets one row of each request."""
    rows = len(groups.codes)
    if groups.order is not None and packs(groups.bits, weights.dtype, weights.device):
        product = grouped_linear(groups._replace(order=None), bias, weights, output=output)
        return Reordered(product, groups.order)
    if weights.device.type == "cuda":
        return _on_gpu(groups, bias, weights)
    exact, packed = weights.kernels.exact, packs(groups.bits, weights.dtype, weights.device)
    if exact or not packed or groups.floats or groups.size not in GROUP_SIZES or rows % 16:
        return PlainLinear(groups.values().to(weights.dtype), bias, exact=exact)
    plain = for_prompts(groups.values(), bias)
    return ByRows(PackedLinear(groups, bias), plain, output=output)


@functools.cache
def dtype_of_prompts() -> torch.dtype:
    """The type of a CPU's products for prompts.

    Without instructions for bfloat16 a CPU converts each number. On such a Xeon of 2.8 GHz, one thread, a
    tile of the embedded model took 1.1 to 1.5 s, and takes 0.3 to 0.6 s in float32."""
    if platform.machine() != "x86_64":
        return torch.bfloat16
    found = torch.cpu.get_capabilities()
    return torch.bfloat16 if found.get("avx512_bf16") or found.get("amx_tile") else torch.float32


def for_prompts(values: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The product of prompts on a CPU, from a copy of the weights that is not packed."""
    dtype = dtype_of_prompts()
    linear = PlainLinear(values.to(dtype), None if bias is None else bias.to(dtype))
    return linear if dtype is torch.bfloat16 else lambda x: linear(x.to(dtype)).to(x.dtype)


def _packs_on_gpu(groups: Groups, weights: Weights) -> bool:
    if weights.device.type != "cuda" or groups.order is not None:
        return False
    if groups.floats and weights.dtype is not torch.bfloat16:
        return False  # float16 has not all scales of MXFP4
    if groups.bits == 8 and groups.codes.shape[1] % 16:
        return False
    size = groups.size if groups.bits == 4 or groups.scales.shape[1] > 1 else None
    fits = _fits_gpu(groups.bits, size, floats=groups.floats)
    return fits and packs(groups.bits, weights.dtype, weights.device)


def _on_gpu(groups: Groups, bias: Tensor | None, weights: Weights) -> LinearMethod:
    from baton.engine.kernels.launch import multiprocessors
    from baton.engine.kernels.quantized.int4_linear import Int4Linear
    from baton.engine.kernels.quantized.int8_linear import Int8Linear

    if not _packs_on_gpu(groups, weights):
        return PlainLinear(groups.values().to(weights.dtype), bias, exact=weights.kernels.exact)
    if groups.bits == 8:
        assert not weights.kernels.exact, "no such product is exact, so they are dequantized"
        return Int8Linear(*groups[:3], bias, weights.dtype, multiprocessors(weights.device))
    weight = four_bits(*groups[:3], weights.dtype, floats=groups.floats)
    return Int4Linear(weight, bias, multiprocessors(weights.device), exact=weights.kernels.exact)


class Reordered(LinearMethod):
    """A product with weights whose columns have another order."""

    def __init__(self, product: LinearMethod, order: Tensor) -> None:
        """Column i of the product's weights is column order[i]."""
        self._product, self._order = product, order

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x.index_select(1, self._order))

    def silu_mul(self, x: Tensor, kernels: Kernels) -> Tensor:
        return self._product.silu_mul(x.index_select(1, self._order), kernels)


class PackedLinear(LinearMethod):
    """y = x Wᵀ + b with torch's kernel for 4 bits on a CPU. It sums the halves of codes of 8 bits."""

    def __init__(self, groups: Groups, bias: Tensor | None) -> None:
        codes, scales, zeros, bits = groups[:4]
        if bits == 4:
            halves = [(codes, scales, zeros)]
        else:  # code − 128 = 16 · (high − 8) + (low − 8) + 8
            halves = [(codes >> 4, 16 * scales, zeros), (codes & 15, scales, 8 * scales)]
        self.size = groups.size
        self.bias = bias
        self.halves = [
            (
                torch.ops.aten._convert_weight_to_int4pack_for_cpu(half.int(), 1),
                torch.stack((scale.T, zero.T), dim=2).bfloat16().contiguous(),  # [groups, rows, 2]
            )
            for half, scale, zero in halves
        ]

    def __call__(self, x: Tensor) -> Tensor:
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        (packed, scales), *low = self.halves
        y = multiply(x, packed, self.size, scales)
        for packed, scales in low:
            y += multiply(x, packed, self.size, scales)
        return y if self.bias is None else y.add_(self.bias)


class ByRows(LinearMethod):
    """Few decodes with one method, all else with another one: prompts in tiles.

    More decodes than `MOST_DECODES` have results that depend on their number, as without groups."""

    def __init__(
        self, packed: LinearMethod, plain: Callable[[Tensor], Tensor], *, output: bool = False
    ) -> None:
        """`output`: no row is of a prompt."""
        self.packed = packed
        self.plain = plain
        self.output = output

    def __call__(self, x: Tensor) -> Tensor:
        count = len(x) if self.output else current_step().decodes
        decodes = self.packed if count <= MOST_DECODES else self.plain
        if count == len(x):
            return decodes(x)
        prompts = self._in_tiles(x[count:])
        return torch.cat((decodes(x[:count]), prompts)) if count else prompts

    def _in_tiles(self, x: Tensor) -> Tensor:
        rows = len(x)
        padded = F.pad(x, (0, 0, 0, -rows % TILE))
        tiles = [self.plain(tile) for tile in padded.split(TILE)]
        return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:rows]
