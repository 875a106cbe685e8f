"""One GGUF file: its tensors, dequantized when read.

The `gguf` package does the arithmetic of the quantization types.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from baton.engine.gguf_header import GGUFHeader
from baton.engine.layers.ranks import Shard

PIECE_BYTES = 128 << 10
"""Quantized bytes that are dequantized at once, so that intermediate results fit a cache."""
KINDS = {int(kind): kind for kind in GGMLQuantizationType}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the header says about a tensor."""

    shape: tuple[int, ...]  # outermost dimension first, as in torch
    kind: GGMLQuantizationType
    offset: int  # from the beginning of the data section

    @property
    def num_bytes(self) -> int:
        values, size = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // values * size


class GGUFFile:
    """A file with its tensors. Raises `ValueError` if the file is not complete."""

    def __init__(self, path: Path) -> None:
        header = GGUFHeader(path)
        self.path = path
        self.metadata = header.metadata
        self.tensors: dict[str, TensorInfo] = {}
        self._data = header.data
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"{path}: corrupt, general.alignment is {alignment!r}")
        self._data_start = -(-header.end // alignment) * alignment
        for name, (shape, number, offset) in header.tensors.items():
            kind = KINDS.get(number)
            if kind is None:
                raise ValueError(f"{path}: tensor {name} is of type {number}, which is not supported")
            if not shape or 0 in shape or shape[-1] % GGML_QUANT_SIZES[kind][0]:
                raise ValueError(f"{path}: corrupt, tensor {name} of type {kind.name} is {list(shape)}")
            self.tensors[name] = info = TensorInfo(shape, kind, offset)
            if offset % alignment:
                raise ValueError(f"{path}: corrupt, tensor {name} is at {offset}, which is not aligned")
            if self._data_start + offset + info.num_bytes > len(self._data):
                raise ValueError(f"{path}: cut short, tensor {name} is incomplete; download it again")

    def blocks(self, name: str) -> np.ndarray:
        """[…, blocks in a row, bytes of a block] uint8: the tensor as it is stored."""
        info = self.tensors[name]
        return np.frombuffer(
            self._data, dtype=np.uint8, count=info.num_bytes, offset=self._data_start + info.offset
        ).reshape(*info.shape[:-1], -1, GGML_QUANT_SIZES[info.kind][1])

    def read(self, name: str, parts: Sequence[Shard]) -> np.ndarray:
        """Returns these parts of the dimensions of the tensor, as float32. Only the quantized blocks that
        hold them are dequantized."""
        info = self.tensors[name]
        values = GGML_QUANT_SIZES[info.kind][0]
        blocks = self.blocks(name)
        *rows, columns = parts
        first, last = columns.start // values, -(-columns.stop // values)
        raw = blocks[(*(part.indices for part in rows), slice(first, last))]
        try:
            values_read = _dequantize(np.ascontiguousarray(raw).reshape(-1), info.kind)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: tensor {name} is of type {info.kind.name}, which is not supported"
            ) from error
        begin = columns.start - first * values
        return values_read.reshape(*raw.shape[:-2], -1)[..., begin : begin + columns.length]


def _dequantize(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Whole blocks of uint8 → float32."""
    if kind == GGMLQuantizationType.F32:
        return raw.view(np.float32).copy()
    values, size = GGML_QUANT_SIZES[kind]
    dequantized_values = np.empty(raw.size // size * values, dtype=np.float32)
    step = max(1, PIECE_BYTES // size)
    for at in range(0, raw.size // size, step):
        piece = raw[None, at * size : (at + step) * size]
        dequantized_values[at * values : (at + step) * values] = dequantize(piece, kind)[0]
    return dequantized_values
