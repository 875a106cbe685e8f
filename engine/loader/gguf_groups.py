"""The quantized blocks of GGUF files as `Groups`, and the format that serves them so.

The types are described in https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from baton.engine.kernels import LinearMethod
from baton.engine.layers.grouped_linear import GroupsFormat, grouped_linear, packs
from baton.engine.layers.linear import PlainLinear
from baton.engine.layers.weights import Groups, Stack, Weights

GROUP = 32
"""Columns of a group, in all these types."""


def _half(raw: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block."""
    return raw[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[…, n] → […, 2 n]: all low halves, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q4_0(raw: Tensor) -> Groups:
    scales = _half(raw, 0)[..., 0]
    return Groups(_nibbles(raw[..., 2:]).flatten(1), scales, torch.zeros_like(scales), 4)


def _q4_1(raw: Tensor) -> Groups:
    scales, minima = _half(raw, 0)[..., 0], _half(raw, 2)[..., 0]
    return Groups(_nibbles(raw[..., 4:]).flatten(1), scales, minima + 8 * scales, 4)


def _q8_0(raw: Tensor) -> Groups:
    scales = _half(raw, 0)[..., 0]
    return Groups((raw[..., 2:] ^ 128).flatten(1), scales, torch.zeros_like(scales), 8)


def _q4_k(raw: Tensor) -> Groups:
    """Blocks of eight groups, with scales and minima of 6 bits."""
    scale, min_scale = _half(raw, 0), _half(raw, 2)  # [rows, blocks, 1]
    first, second, third = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=-1).float()
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=-1).float()
    scales, minima = (scale * scales).flatten(1), (min_scale * minima).flatten(1)
    return Groups(_nibbles(raw[..., 16:].unflatten(-1, (4, 32))).flatten(1), scales, 8 * scales - minima, 4)


UNPACK: dict[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q8_0": _q8_0,
}
"""By type: [rows, blocks, bytes of a block] uint8 → its groups."""


BITS = {kind: 8 if kind == "Q8_0" else 4 for kind in UNPACK}


@dataclass(frozen=True, kw_only=True)
class GGUFFormat(GroupsFormat):
    """The quantized matrices of a GGUF file.

    A product is packed if all its matrices have groups with equally many bits. Else it is plain."""

    products: Mapping[tuple[str, ...], int]
    """Parameters of the products of all layers, by the types of their matrices."""
    of_experts: Mapping[tuple[str, ...], int]
    """The same of routed experts."""
    identity: str = "gguf"

    def bytes_per_parameter(
        self, dtype: torch.dtype, *, output: bool = False, experts: bool = False
    ) -> float:
        """The mean of all products."""
        products = self.of_experts if experts else self.products
        if output or not products:
            return dtype.itemsize

        def of(types: Iterable[str]) -> float:
            bits = _bits(types)
            return self.kept_bytes(bits, GROUP, dtype, experts=experts) if bits else dtype.itemsize

        return fmean(map(of, products), products.values())

    @property
    def has_int8(self) -> bool:
        return any(_bits(types) == 8 for types in self.products)

    def tied(self, weights: Weights, stack: Stack, embedding: Tensor) -> LinearMethod:
        plain = weights.device.type == "cuda" or weights.kernels.exact
        groups = None if plain else self.read_groups(weights, stack)
        if groups is None or not packs(groups.bits, weights.dtype, weights.device):
            return PlainLinear(embedding, exact=weights.kernels.exact)
        return grouped_linear(groups, None, weights, output=True)


def gguf(settings: Mapping[str, Any], source: str, device: torch.device) -> GGUFFormat:
    products = settings["products"]
    name = f"gguf ({', '.join(sorted(set(chain(*products))))})"
    return GGUFFormat(name=name, products=products, of_experts=settings["of_experts"], device=device)


def serves_packed(settings: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a device serves this file packed by default: it has products that the device reads packed."""
    bits_of = [_bits(types) for types in settings["products"]]
    return any(bits is not None and packs(bits, dtype, device) for bits in bits_of)


def _bits(types: Iterable[str]) -> int | None:
    """Bits of the codes of a product whose matrices have these types. None: it is plain."""
    bits_of = {BITS.get(kind) for kind in types}
    return bits_of.pop() if len(bits_of) == 1 else None
