"""Tensors in the GPU memory of a trainer on the same host.

`baton.weights` writes the file (`engine.trainer_files`), which has handles of CUDA IPC in place of values:

    {"memory": [handle, …],
     "tensors": {name: {"dtype": "bfloat16", "shape": [2, 3], "memory": 0, "offset": 512}, …}}

A handle is 64 bytes in hexadecimal digits, for a whole allocation. `memory` of a tensor is the index of its
allocation, and `offset` says at which byte it begins there. Nothing is unpickled, and nothing is read beyond
the end of an allocation.
"""

import math
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.engine import trainer_files
from baton.engine.layers.ranks import Shard
from baton.engine.loader.settings import read_json
from baton.system import cuda_driver
from baton.system.cuda_driver import CudaError

MOST_DIMENSIONS = 8
COPY_CHECK = 0.1
"""Seconds between two looks whether a trainer has copied its tensors."""
_KINDS = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _KINDS}


class _Place(NamedTuple):
    dtype: torch.dtype
    shape: Sequence[int]
    address: int

    def get_shape(self) -> Sequence[int]:
        return self.shape


class DeviceFile:
    """It has names and shapes as a safetensors file does (`safe_open`). The trainer's memory is open until
    nothing refers to this, also if the trainer dies. All calls are made in one thread, with one stream."""

    def __init__(self, path: Path, device: torch.device) -> None:
        """Raises `ValueError` naming the file and what is wrong with it."""
        self._device = device
        fields = read_json(path)
        memory, tensors = fields.get("memory"), fields.get("tensors")
        if not isinstance(memory, list) or not isinstance(tensors, dict):
            raise ValueError(f"{path}: must have a list of memory, and tensors by name")
        opened, stream = list[int](), torch.cuda.current_stream()
        stream.synchronize()  # this thread has the context of the device now
        weakref.finalize(self, _close, opened, stream)
        spans = list[tuple[int, int]]()
        for handle in memory:
            try:
                opened.append(cuda_driver.open_handle(bytes.fromhex(handle)))
                spans.append(cuda_driver.allocation(opened[-1]))
            except (CudaError, OSError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}: the memory of the trainer cannot be opened: {error}. The trainer must run, on "
                    "this host, and its GPU must be one that this worker's GPU can read"
                ) from None
        self._places = {name: _checked(path, name, value, spans) for name, value in tensors.items()}

    def keys(self) -> Collection[str]:
        return self._places.keys()

    def get_slice(self, name: str) -> _Place:
        """What has the shape of the tensor."""
        return self._places[name]

    def read(self, name: str, parts: Sequence[Shard]) -> Tensor:
        """These parts of the dimensions, copied to the device of the worker in the order of the current
        stream. What they leave out of rows is copied, too."""
        dtype, shape, address = self._places[name]
        rows = parts[0] if parts else Shard(0, 1, 1)
        of_row = math.prod(shape[1:])
        tensor = torch.empty([rows.length, of_row], dtype=dtype, device=self._device)
        if tensor.numel():
            begin = address + rows.start * of_row * dtype.itemsize
            stream = torch.cuda.current_stream().cuda_stream
            cuda_driver.copy(tensor.data_ptr(), begin, tensor.nbytes, stream)
        tensor = tensor.view([rows.length, *shape[1:]] if parts else [])
        return tensor[(..., *(part.indices for part in parts[1:]))]


def wait_for_copy(directory: Path, progress: Callable[[str, float], None]) -> None:
    """Returns when the trainer needs its memory no more for this checkpoint, since all is in memory of the
    host. An engine that starts reads for longer than the trainer leaves its tensors as they are. Raises
    `ValueError` if the trainer ends before."""
    while files := trainer_files.found_in(directory.glob("*")):
        trainer_files.check_runs(files)
        progress("waiting for the trainer's copy of the weights", 0.0)
        time.sleep(COPY_CHECK)


def check_device(path: Path, device: torch.device | None) -> torch.device:
    """Raises `ValueError` if a worker with this device cannot read GPU memory."""
    if device is None or device.type != "cuda":
        raise ValueError(
            f"{path}: the weights are in GPU memory, and the worker has no GPU: give them in memory of the "
            "host"
        )
    return device


def _close(opened: Sequence[int], stream: Any) -> None:
    stream.synchronize()  # a copy may be under way
    for address in opened:
        cuda_driver.close_handle(address)


def _checked(path: Path, name: str, value: Any, spans: Sequence[tuple[int, int]]) -> _Place:
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    shape = fields.get("shape")
    memory, offset = (fields.get(key, -1) for key in ("memory", "offset"))
    dtype = DTYPES.get(str(fields.get("dtype")))
    sizes = shape if isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS else [-1]
    numbers = [*sizes, memory, offset]
    if dtype is None or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{path}: tensor {name}: dtype, shape, memory or offset is not what it may be")
    base, size = spans[memory] if memory < len(spans) else (0, 0)
    end = offset + math.prod(sizes) * dtype.itemsize
    if end > size:
        raise ValueError(f"{path}: tensor {name} ends at byte {end} of memory {memory}, which has {size}")
    if offset % dtype.itemsize:
        raise ValueError(f"{path}: tensor {name} begins at byte {offset}, amid an element")
    return _Place(dtype, sizes, base + offset)
