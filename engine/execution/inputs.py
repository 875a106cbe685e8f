"""The arrays of a step on the device, and as attention reads them.

A *query* that decodes is a request of its own to the kernels: it has the block table of its request and the
context up to its own position. So a request may decode several tokens in a step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from baton.engine.kernels.attention.paged import Apart, AttentionMetadata
from baton.engine.kernels.attention.tiles import NO_IMAGES, SHORT, Images, Shape
from baton.engine.kernels.upload import aligned
from baton.engine.step import ARRAYS, Draws, Layout, Step

ON_DEVICE = {name: layout for name, layout in ARRAYS.items() if layout.on_device}
"""The arrays of a step that the device reads."""
_read = attrgetter(*ON_DEVICE)


def read_by_device(step: Step) -> dict[str, np.ndarray]:
    """The arrays of a step that the device reads. A query that decodes has a row where a request has one, and
    `contexts` has only these rows."""
    arrays = dict(zip(ON_DEVICE, _read(step), strict=True))
    rows, decodes = step.decode_rows, step.num_decodes
    arrays["contexts"] = step.contexts[:decodes]
    if rows > decodes:
        assert not len(step.state_slots), "a state takes one token after the other"
        times = np.append(step.query_lengths[:decodes], np.ones(step.num_prefills, np.int64))
        arrays["block_tables"] = step.block_tables.repeat(times, axis=0)
        arrays["contexts"] = (step.positions[:rows] + 1).astype(np.int32)
    return arrays


def attention_metadata(
    tensors: Mapping[str, Tensor],
    *,
    block_size: int,
    num_decodes: int,
    prefills: Sequence[tuple[int, int]],
    images: Images = NO_IMAGES,
    apart: Apart | None = None,
    tile_shape: Shape = SHORT,
) -> AttentionMetadata:
    """The metadata with these tensors, by the names of its fields. One that may be None is None if empty."""
    if "ahead.places" in tensors:
        tensors = {**tensors, "places": tensors["ahead.places"]}
    values = {
        field.name: tensors[field.name]
        for field in fields(AttentionMetadata)
        if field.name in tensors and (len(tensors[field.name]) or field.default is MISSING)
    }
    return AttentionMetadata(
        block_size=block_size,
        num_decodes=num_decodes,
        prefills=prefills,
        images=images,
        apart=apart,
        tile_shape=tile_shape,
        **values,
    )


def draws_of(tensors: Mapping[str, Tensor]) -> Draws[Tensor]:
    return Draws(*(tensors[f"draws.{name}"] for name in Draws._fields))


class Inputs:
    """All arrays that graphs read, in one piece of memory. The block tables come last, so that only the
    tables in use are copied."""

    def __init__(
        self, memory: Callable[[int], Tensor], sizes: Mapping[str, int], work: Mapping[str, Layout]
    ) -> None:
        """`sizes` of the dimensions. `work`: arrays that graphs read beside those of a step."""
        layouts = {**ON_DEVICE, **work}
        layouts["block_tables"] = layouts.pop("block_tables")
        arrays = {name: np.empty(layout.shape(sizes), layout.dtype) for name, layout in layouts.items()}
        ends = np.cumsum([0, *(aligned(array.nbytes) for array in arrays.values())]).tolist()
        self.memory = memory(ends[-1])
        self.tensors = {
            name: self.memory[at : at + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
            for (name, array), at in zip(arrays.items(), ends, strict=False)
        }
        on_host = self.memory.device.type == "cpu"
        self._on_host = {name: tensor.numpy() for name, tensor in self.tensors.items() if on_host}
        self._layouts = layouts
        self._tables_offset = ends[-2]

    def put(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes these arrays, which have block tables, and padding to the rest of each."""
        for name, values in arrays.items():
            field, count = self._on_host[name], len(values)
            field[:count] = values
            padding = self._layouts[name].padding
            if padding is not None:
                field[count:] = padding
        self._used = self._tables_offset + arrays["block_tables"].nbytes

    def move_to(self, target: "Inputs") -> None:
        """Enqueues the copy of what was put here last."""
        target.memory[: self._used].copy_(self.memory[: self._used], non_blocking=True)

    def first(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """All arrays, those by one of these dimensions cut to its size."""
        dims = {name: str(layout.dims[0]) for name, layout in self._layouts.items()}
        return {name: tensor[: sizes.get(dims[name])] for name, tensor in self.tensors.items()}
