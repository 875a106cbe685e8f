"""Integer weights of Hugging Face checkpoints: where the codes and the groups are.

Words of 32 bits hold integers of 2, 4 or 8 bits, the first one in the lowest bits, unless told otherwise:

    gptq                 qweight [words of in, out], qzeros [groups, words of out] less 1,
                         scales [groups, out]
    awq                  qweight [in, words of out], qzeros [groups, words of out], scales [groups, out]; the
                         eight integers of a word are in the order AWQ_ORDER
    auto-round           as gptq, without `g_idx`; its `packing_format` says whether the zeros are less by 1
    compressed-tensors   weight_packed [out, words of in], weight_scale [out, groups], and if asymmetric
                         weight_zero_point [words of out, groups]; or weight [out, in] and weight_zero_point
                         as int8

A matrix whose rows have one scale each is one group of all columns.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.engine.layers.grouped_linear import GroupsFormat
from baton.engine.layers.ranks import Shard, unsharded
from baton.engine.layers.weights import Groups, PlainFormat, Stack, Weights, stacked
from baton.engine.loader.by_module import ByModule, Dequantized, by_module, require

BITS = (2, 4, 8)
SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Columns of a group."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output i of a word is at this place in it."""

SCALES = (torch.float16, torch.bfloat16, torch.float32)
OF_ACTIVATIONS = "input_scale", "input_zero_point", "input_global_scale"
"""Tensors that say how to quantize activations. Activations stay as they are, which is more exact."""

Reader = Callable[[Weights, str, Shard, Shard], Groups]
"""Reads rows × columns of a projection; the columns are whole groups."""


@dataclass(frozen=True, kw_only=True)
class StoredGroups(GroupsFormat, Dequantized):
    bits: int
    size: int | None
    """Columns of a group. None: all."""
    marker: str
    """Suffix of a tensor that each quantized matrix has; matrices without it are plain."""
    read: Reader
    floats: bool = False
    """As in `Groups`."""

    def bytes_per_parameter(
        self, dtype: torch.dtype, *, output: bool = False, experts: bool = False
    ) -> float:
        if output:
            return dtype.itemsize
        return self.kept_bytes(max(self.bits, 4), self.size, dtype, experts=experts, floats=self.floats)

    @property
    def has_int8(self) -> bool:
        return self.bits == 8

    def reads(self, weights: Weights, name: str) -> bool:
        return weights.has(f"{name}.{self.marker}")

    def read_groups(self, weights: Weights, stack: Stack) -> Groups | None:
        """None: `desc_act` gave the columns of these matrices different orders."""
        parts = zip(stack.names, stack.rows, strict=True)
        return stacked([self._part(weights, name, rows, stack.columns) for name, rows in parts])

    def _part(self, weights: Weights, name: str, rows: Shard, columns: Shard) -> Groups:
        if self.size is not None:
            columns.check_groups(self.size, f"{name} in {weights.source}")
        for suffix in OF_ACTIVATIONS:
            if weights.has(f"{name}.{suffix}"):
                weights.stored(f"{name}.{suffix}", None, *SCALES, torch.int8)
        return self.read(weights, name, rows, columns)

    def values(self, weights: Weights, name: str, rows: Shard, columns: Shard) -> Tensor:
        return self._part(weights, name, rows, columns).values()


def gptq(settings: Mapping[str, Any], source: str, device: torch.device) -> ByModule:
    """With `dynamic`: of the patterns that match the beginning of a module's name the first one counts.
    "-:" leaves the module plain, "+:" or no sign changes settings (GPTQModel 4)."""
    rules = settings.get("dynamic") or {}
    if not isinstance(rules, Mapping) or not all(isinstance(each, Mapping | None) for each in rules.values()):
        raise ValueError(f"{source}: quantization_config: dynamic {rules!r} is not supported")
    usual = _gptq_format(settings, source, device)
    special: list[tuple[re.Pattern[str], StoredGroups | None]] = []
    for pattern, changes in rules.items():
        changed = None if pattern.startswith("-:") else {**settings, **(changes or {})}
        made = None if changed is None else _gptq_format(changed, source, device)
        special.append((compiled(pattern.removeprefix("-:").removeprefix("+:"), source, "dynamic"), made))

    def chosen(name: str) -> PlainFormat | None:
        return next((made for pattern, made in special if pattern.match(name)), usual)

    formats = [usual, *(made for _, made in special if made is not None)]
    return by_module(formats, chosen, source, extra_biases=True)


def _gptq_format(settings: Mapping[str, Any], source: str, device: torch.device) -> StoredGroups:
    version = settings.get("checkpoint_format") or "gptq"
    require({"checkpoint_format": version}, source, checkpoint_format=("gptq", "gptq_v2"))
    require(settings, source, bits=BITS, pack_dtype=("int32", None))
    less, sym = (1 if version == "gptq" else 0), settings.get("sym") is True
    return of_columns(version, settings, source, device, less, sym=sym)


def of_columns(
    stored: str, settings: Mapping[str, Any], source: str, device: torch.device, less: int, *, sym: bool
) -> StoredGroups:
    bits, size = settings["bits"], size_of(settings.get("group_size"), source)
    return stored_groups(stored, bits, size, "qweight", partial(_gptq, bits, size, less, sym), device)


def awq(settings: Mapping[str, Any], source: str, device: torch.device) -> ByModule:
    require(settings, source, version=("gemm", "GEMM", None))
    made = awq_format(settings, source, device)
    return by_module([made], lambda _: made, source, extra_biases=True)


def awq_format(settings: Mapping[str, Any], source: str, device: torch.device) -> StoredGroups:
    require({"bits": settings.get("bits", settings.get("w_bit"))}, source, bits=(4,))
    size = size_of(settings.get("group_size", settings.get("q_group_size")), source)
    return stored_groups("awq", 4, size, "qweight", partial(_awq, size), device)


def compressed_packed(kept: Mapping[str, Any], source: str, device: torch.device) -> StoredGroups:
    """`format` pack-quantized of compressed-tensors. `kept`: how a group keeps weights."""
    require(kept, source, num_bits=BITS, type=("int",), actorder=(None, False, "static", "weight"))
    bits, size = kept["num_bits"], compressed_size(kept, source)
    read = partial(_compressed, bits, size)
    return stored_groups("compressed-tensors", bits, size, "weight_packed", read, device)


def compressed_bytes(kept: Mapping[str, Any], source: str, device: torch.device) -> StoredGroups:
    """`format` int-quantized of compressed-tensors: a byte for each integer, whatever its bits."""
    require(kept, source, num_bits=(4, 8), type=("int",), actorder=(None, False, "static", "weight"))
    size = compressed_size(kept, source)
    return stored_groups(
        "compressed-tensors bytes of", 8, size, "weight_scale", partial(bytes_of, size, OF_COMPRESSED), device
    )


def compressed_size(kept: Mapping[str, Any], source: str) -> int | None:
    require(kept, source, strategy=("group", "channel", "tensor"))
    return size_of(kept.get("group_size"), source) if kept["strategy"] == "group" else None


def stored_groups(
    stored: str,
    bits: int,
    size: int | None,
    marker: str,
    read: Reader,
    device: torch.device,
    *,
    kind: str = "int",
) -> StoredGroups:
    name = f"{stored} {kind}{bits} {'by row' if size is None else f'in groups of {size}'}"
    floats = kind != "int"
    return StoredGroups(
        name=name, identity=name, bits=bits, size=size, marker=marker, read=read, device=device, floats=floats
    )


def compiled(pattern: str, source: str, setting: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{source}: quantization_config: {setting} {pattern!r}: {error}") from error


def size_of(size: Any, source: str) -> int | None:
    """Columns of a group. None: -1, all columns."""
    if type(size) is not int or size not in (*SIZES, -1):
        sizes = ", ".join(map(str, SIZES))
        raise ValueError(
            f"{source}: quantization_config: groups of {size!r} are not supported ({sizes}, -1 are)"
        )
    return None if size == -1 else size


def groups_of(columns: Shard, size: int | None) -> Shard:
    return unsharded(1) if size is None else columns.in_groups(size)


def _gptq(
    bits: int,
    size: int | None,
    less: int,
    sym: bool,
    weights: Weights,
    name: str,
    rows: Shard,
    columns: Shard,
) -> Groups:
    word = 32 // bits
    words = weights.stored(f"{name}.qweight", (columns.in_groups(word), rows), torch.int32)
    codes, order = within(_unpacked(words.T.contiguous(), bits), columns, word), None
    if weights.has(f"{name}.g_idx"):
        index = weights.stored(f"{name}.g_idx", (columns,), torch.int32)
        each = size or columns.size
        ordered = torch.arange(columns.start, columns.stop, dtype=torch.int32, device=index.device) // each
        if not index.is_meta and not index.equal(ordered):  # `desc_act`
            order = index.argsort(stable=True)
            if not index[order].equal(ordered):
                raise ValueError(
                    f"{weights.source}: {name}.g_idx: --tensor-parallel-size cuts groups, or a group has not "
                    f"{each} columns"
                )
            codes = codes[:, order]
    groups = groups_of(columns, size)
    scales = weights.stored(f"{name}.scales", (groups, rows), *SCALES).float()
    packed = weights.stored(f"{name}.qzeros", (groups, rows.in_groups(word)), torch.int32)
    # Tools take 1 from each zero of a word at once: one that is 0 borrows from the next one.
    packed = packed + less * sum(1 << at for at in range(0, 32, bits))
    zeros = within(_unpacked(packed, bits), rows, word).float()
    if sym and not zeros.is_meta and not (zeros == 1 << (bits - 1)).all():
        raise ValueError(
            f"{weights.source}: {name}.qzeros are not those of symmetric weights, though sym is true: "
            "correct sym, or the version of the format"
        )
    return _around(codes, scales.T, zeros.T, bits)._replace(order=order)


def _awq(size: int | None, weights: Weights, name: str, rows: Shard, columns: Shard) -> Groups:
    word = len(AWQ_ORDER)

    def unpacked(suffix: str, first: Shard) -> Tensor:
        words = weights.stored(f"{name}.{suffix}", (first, rows.in_groups(word)), torch.int32)
        ordered = _unpacked(words, 4).unflatten(1, (-1, word))[:, :, list(AWQ_ORDER)]
        return within(ordered.flatten(1), rows, word).T

    codes, groups = unpacked("qweight", columns).contiguous(), groups_of(columns, size)
    zeros = unpacked("qzeros", groups).float()
    scales = weights.stored(f"{name}.scales", (groups, rows), *SCALES).float()
    return _around(codes, scales.T, zeros, 4)


def _compressed(
    bits: int, size: int | None, weights: Weights, name: str, rows: Shard, columns: Shard
) -> Groups:
    word, groups = 32 // bits, groups_of(columns, size)
    words = weights.stored(f"{name}.weight_packed", (rows, columns.in_groups(word)), torch.int32)
    codes = within(_unpacked(words, bits), columns, word)
    scales = scales_of(weights, name, rows, groups, *SCALES).float()
    shape = weights.stored(f"{name}.weight_shape", (unsharded(2),), torch.int64, torch.int32)
    if not shape.is_meta and shape.tolist() != [rows.size, columns.size]:
        raise ValueError(
            f"{weights.source}: {name}.weight_shape is {shape.tolist()}, not {[rows.size, columns.size]}"
        )
    if not weights.has(f"{name}.weight_zero_point"):
        return _around(codes, scales, torch.full_like(scales, 1 << (bits - 1)), bits)
    parts = (rows.in_groups(word), groups)
    packed = weights.stored(f"{name}.weight_zero_point", parts, torch.int32)
    zeros = within(_unpacked(packed.T.contiguous(), bits), rows, word).float()
    return _around(codes, scales, zeros.T, bits)


OF_COMPRESSED = "weight", "weight_scale", "weight_zero_point"


def bytes_of(
    size: int | None, suffixes: Sequence[str], weights: Weights, name: str, rows: Shard, columns: Shard
) -> Groups:
    groups, (codes_of, scale, zero_point) = groups_of(columns, size), suffixes
    codes = weights.stored(f"{name}.{codes_of}", (rows, columns), torch.int8)
    scales = scales_of(weights, name, rows, groups, *SCALES, suffix=scale).float()
    zeros = torch.zeros_like(scales)
    if weights.has(f"{name}.{zero_point}"):
        zeros = scales_of(weights, name, rows, groups, torch.int8, suffix=zero_point).float()
    return _around(codes.view(torch.uint8) ^ 128, scales, zeros + 128, 8)


def scales_of(
    weights: Weights,
    name: str,
    rows: Shard,
    groups: Shard,
    *dtypes: torch.dtype,
    suffix: str = "weight_scale",
) -> Tensor:
    """[rows, groups], of which a file may have one for all rows."""
    one = weights.shape(f"{name}.{suffix}") in ((1,), ()) and groups.size == 1
    stored = weights.stored(f"{name}.{suffix}", None if one else (rows, groups), *dtypes)
    return stored.view(1, 1).expand(rows.length, 1).contiguous() if one else stored


def _around(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Groups:
    """(code − zero) · scale. Codes of 2 bits become codes of 4 bits."""
    wide = max(bits, 4)
    more = (1 << (wide - 1)) - (1 << (bits - 1))
    middle = 1 << (bits - 1)
    return Groups(codes + more, scales.contiguous(), ((middle - zeros) * scales).contiguous(), wide)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """[rows, words] int32 → [rows, words · integers in a word] uint8."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[:, :, None] >> shifts).bitwise_and_((1 << bits) - 1).to(torch.uint8).flatten(1)


def nibbles(packed: Tensor) -> Tensor:
    """Two codes in a byte, the first one in its lower half: [rows, …] uint8 → [rows, columns]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def within(unpacked: Tensor, part: Shard, word: int) -> Tensor:
    """The columns of this part, from those of its words."""
    first = part.start % word
    return unpacked[:, first : first + part.length]
