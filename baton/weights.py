"""For trainers: gives all workers of a cluster the weights of a torch `state_dict`, through memory.

    weights = Weights("http://router:8000", admin_key, like="/models/base")
    with weights.paused():
        weights.update(model.state_dict(), version="step-200")

The tensors are written as safetensors to memory of this host, or stay in that of a GPU. Workers read them: so
they run here, too. Names and shapes are those of the checkpoint `like`, which workers serve. Workers that
start later read the newest weights, so they stay in memory of the host until the next ones, or until `close`.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Self

import torch

from baton.engine import trainer_files
from baton.system import cuda_driver, usable_cpus
from baton.system.cuda_driver import CudaError

HostMemory = Literal["shm", "memfd"]
"""`shm`: files of /dev/shm, which containers often have little of. `memfd`: anonymous memory that ends with
this process. Workers open that through /proc, so they run as the same user."""
Memory = Literal[HostMemory, "cuda"]
"""Where weights are for an update. `cuda`: where the trainer has them, on its GPUs. Workers copy them from
there by CUDA IPC, and the trainer changes nothing before `update` returns."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a directory with a random name is made there
MOST_THREADS = 8
"""That write at the same time. On two cores one writes 2.2 GB/s to new memory, and two 3.8: it is the system
that takes the time. More than eight have not been measured, and workers of the host need CPUs, too."""
LEAST_FILE, PIECE = 64 << 20, 16 << 20
"""Bytes of a file, if there are several: a thread writes it for 30 ms, and starts in far less. Bytes of a
copy from a GPU: so no copy takes new memory."""
_INDEX = ".safetensors.index.json"
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class RefusedUpdate(Exception):
    """The router or a worker refuses. The message says why, and whether weights have changed."""


class UnfinishedUpdate(RefusedUpdate):
    """All workers compute with the new weights, and what follows has failed.

    Attributes:
        version: of these weights, as `Weights.update` would return it.
    """

    def __init__(self, version: str, faults: Sequence[Exception]) -> None:
        """`faults`: at least one."""
        told = "; ".join(map(str, faults))
        super().__init__(f"all workers compute with the new weights, version {version}, but {told}")
        self.version = version


def full_tensors(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors on their devices, each once: of tensors that are the same memory (tied weights), only the
    first. Shards of FSDP (DTensor) are gathered, so all ranks must call this, with the same names."""
    found = dict[str, torch.Tensor]()
    seen = set[tuple[int, torch.Size, tuple[int, ...]]]()
    for name, tensor in state.items():
        gather = getattr(tensor, "full_tensor", None)
        whole = (gather() if callable(gather) else tensor).detach()
        place = whole.data_ptr(), whole.shape, whole.stride()
        if place not in seen or not whole.numel():
            seen.add(place)
            found[name] = whole
    return found


class Checkpoint:
    """A directory that workers read as a checkpoint: weights in memory, and all else from the model `like`.

    Ranks of a trainer that each have some of the tensors make one with the same `directory`, and write a
    shard each.
    """

    def __init__(self, directory: Path, like: Path, memory: Memory = "shm") -> None:
        """Raises `ValueError` if `like` is no directory with a model."""
        if not (like / "config.json").is_file():
            raise ValueError(
                f"like: {like} has no config.json: give the directory of the model that workers serve"
            )
        self.directory = directory
        self.memory: Memory = memory
        self._files = list[int]()
        self._locks = list[int]()  # of files that stand for tensors on GPUs
        self._on_gpus = dict[Path, dict[str, torch.Tensor]]()  # tensors that workers read by handles
        directory.mkdir(parents=True, exist_ok=True)
        for file in like.glob("*.json"):
            if not file.name.endswith(_INDEX):
                with contextlib.suppress(FileExistsError):  # of another rank
                    (directory / file.name).symlink_to(file.resolve())

    def write(self, state: Mapping[str, torch.Tensor], shard: int = 0, shards: int = 1) -> None:
        """Writes all tensors, or those of one shard: no two shards have the same name. Raises `ValueError` if
        a tensor is of another type than checkpoints have, or has no memory that workers can open."""
        assert 0 <= shard < shards, f"shard {shard} of {shards}"
        tensors = full_tensors(state)
        for name, tensor in tensors.items():
            _check_dtype(name, tensor)
        path = self.directory / f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        if self.memory == "cuda":
            whole = self._on_gpus[path] = {name: tensor.contiguous() for name, tensor in tensors.items()}
            file = path.with_suffix(trainer_files.SUFFIX)
            self._locks.append(trainer_files.write(file, _handles(whole)))
        else:
            self._to_host(path, tensors, self.memory)

    def keep(self, memory: HostMemory) -> None:
        """Copies what `write` has left on GPUs to memory of this host, for workers that start later. Then the
        tensors may change. Each rank does it once all workers have the weights, or calls `remove`."""
        for path, tensors in self._on_gpus.items():
            self._to_host(path, tensors, memory)
        for path in self._on_gpus:  # last: with files of handles, workers that start wait
            path.with_suffix(trainer_files.SUFFIX).unlink()
        self._unlock()
        self._on_gpus.clear()

    def _to_host(self, path: Path, tensors: Mapping[str, torch.Tensor], memory: HostMemory) -> None:
        """Writes one file a thread, at the same time: new memory costs the system more than the copy, and it
        takes one thread at a time for a file."""
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()  # the threads have streams of their own
        size = sum(tensor.nbytes for tensor in tensors.values())
        count = max(1, min(MOST_THREADS, usable_cpus(), size // LEAST_FILE))
        paths = [path, *(path.with_stem(f"{path.stem}-{i}") for i in range(1, count))]
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(self._write_file, paths, _evenly(tensors, count), [memory] * count))

    def _write_file(self, path: Path, tensors: Mapping[str, torch.Tensor], memory: HostMemory) -> None:
        if memory == "shm":
            with path.open("wb", buffering=0) as file:
                _write(file, tensors)
            return
        fd = os.memfd_create(path.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._files.append(fd)
        with open(fd, "wb", buffering=0, closefd=False) as file:
            _write(file, tensors)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
        path.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")

    def remove(self) -> None:
        """Gives the memory back when no worker reads it any more."""
        for fd in self._files:
            os.close(fd)
        self._files.clear()
        self._on_gpus.clear()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        """Last: a process that finds a file without its lock takes this one for dead."""
        for fd in self._locks:
            os.close(fd)
        self._locks.clear()


def _handles(tensors: Mapping[str, torch.Tensor]) -> str:
    """What `engine.loader.device_file` reads. The values are in memory when this returns."""
    memory, found = dict[int, str](), dict[str, Any]()  # handles by address
    for name, tensor in tensors.items():
        base = tensor.data_ptr()
        if tensor.numel():
            try:
                with torch.cuda.device(tensor.device):
                    torch.cuda.synchronize()  # the values are there, and this thread has the context
                    base, _ = cuda_driver.allocation(base)
                    memory[base] = memory.get(base) or cuda_driver.export_handle(base).hex()
            except (CudaError, OSError, ValueError) as error:
                raise ValueError(
                    f"{name} is on {tensor.device}, in memory that no other process can open ({error}): use "
                    "memory='shm', or GPU memory of torch's allocator without expandable_segments"
                ) from None
        found[name] = {
            "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape),
            "memory": list(memory).index(base) if tensor.numel() else 0, "offset": tensor.data_ptr() - base,
        }  # fmt: skip
    return json.dumps({"memory": [*memory.values()], "tensors": found})


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{name} is of {tensor.dtype}, which safetensors does not have")


def _evenly(tensors: Mapping[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """Parts with about as many bytes each."""
    parts = [dict[str, torch.Tensor]() for _ in range(count)]
    sizes = [0] * count
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        least = sizes.index(min(sizes))
        parts[least][name] = tensor
        sizes[least] += tensor.nbytes
    return parts


def _write(file: IO[bytes], tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes safetensors, tensor by tensor. The library's `save` makes a second copy of all, and `save_file`
    renames a file beside its own, which a memfd has not."""
    header, end = dict[str, Any](), 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    _write_all(file, len(text).to_bytes(8, "little") + text)
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    pinned = torch.empty(PIECE if on_gpu else 0, dtype=torch.uint8, pin_memory=on_gpu)
    for tensor in tensors.values():
        if tensor.numel():
            whole = tensor if tensor.is_contiguous() else tensor.to("cpu").contiguous()
            for part in whole.reshape(-1).view(torch.uint8).split(PIECE):
                part = pinned[: part.numel()].copy_(part) if part.is_cuda else part
                _write_all(file, part.numpy().data)


def _write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


@dataclass(slots=True)
class Spent:
    """The seconds of an update, part by part."""

    nbytes: int = 0
    """Of the new weights, on the worker with the most."""
    write: float = 0.0
    """The trainer writes the checkpoint. 0 if ranks have written it themselves."""
    read: float = 0.0
    """The longest that a worker read and checked it."""
    pause: float = 0.0
    """No worker served."""
    keep: float = 0.0
    """The copy for workers that start later."""


class Weights:
    """The weights of a cluster, as its trainer sees them. Not for several threads.

    Attributes:
        spent: of the last `update`, or `apply`.
    """

    def __init__(
        self,
        url: str,
        admin_key: str,
        like: str | Path,
        *,
        memory: Memory = "shm",
        later: HostMemory | None = "memfd",
        directory: str | Path | None = None,
        timeout: float = 600.0,
    ) -> None:
        """`url`: of a router, or of its admin port. `directory`: where checkpoints are made; None: a new one
        in /dev/shm, or without `shm` in the directory for temporary files. `later`: with `cuda`, where
        `update` copies weights that all workers have, for workers that start later; None: these cannot get
        them. `timeout`: seconds for a call."""
        self._url, self._key, self._like = url.rstrip("/"), admin_key, Path(like)
        self._memory, self._timeout = memory, timeout
        self._later: HostMemory | None = later
        place = directory or (SHARED_MEMORY if "shm" in (memory, later) else None)
        self._directory = Path(tempfile.mkdtemp(prefix="baton-weights-", dir=place))
        self._newest: Checkpoint | None = None
        self._count = 0
        self.spent = Spent()
        self._paused: bool | None = None
        """`clear_cache` of the pause that is open. None: none is."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(
        self,
        state: Mapping[str, torch.Tensor] | list[Mapping[str, torch.Tensor]],
        version: str | None = None,
        *,
        keep_kv: bool = False,
    ) -> str:
        """Gives all workers these weights: a whole `state_dict`, or several that have some of the tensors
        each. Returns the name of the version, which begins with `version`. Raises RefusedUpdate: before the
        last step that changes nothing, and as an UnfinishedUpdate all workers have these weights.

        `keep_kv`: as in `paused(clear_cache=False)`, but workers are paused only while they copy the weights
        over the old ones, and not while they read them."""
        checkpoint = self.new_checkpoint()
        try:
            shards: list[Mapping[str, torch.Tensor]] = state if isinstance(state, list) else [state]
            began = time.monotonic()
            for number, shard in enumerate(shards):
                checkpoint.write(shard, number, len(shards))
            written = time.monotonic() - began
            try:
                return self.apply(checkpoint, version, keep_kv=keep_kv)
            finally:
                self.spent.write = written
        finally:
            if checkpoint is not self._newest:
                checkpoint.remove()

    def new_checkpoint(self) -> Checkpoint:
        """For ranks that write a shard each. `apply` follows, once."""
        self._count += 1
        return Checkpoint(self._directory / f"update-{self._count}", self._like, self._memory)

    def apply(self, checkpoint: Checkpoint, version: str | None = None, *, keep_kv: bool = False) -> str:
        """As `update`, of a checkpoint that is complete. What other ranks of the trainer have written on GPUs
        they keep or remove themselves."""
        self._call("/init_weight_transfer_engine", {"init_info": {"backend": "disk"}})
        self._call("/start_weight_update")
        staged = self._call("/update_weights", {"update_info": {"path": str(checkpoint.directory)}})
        self.spent = Spent(staged["bytes"], read=staged["read_seconds"])
        with contextlib.ExitStack() as pause:
            if keep_kv:
                pause.enter_context(self.paused(clear_cache=False))
            done = self._call("/finish_weight_update", {"weight_version": version})
            pause = pause.pop_all()
        self.spent.pause = done["pause_seconds"]
        faults = list[Exception]()
        for step in (pause.close, lambda: self._settle(checkpoint)):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - told to the caller, with what was done
                faults.append(error)
        if faults:
            raise UnfinishedUpdate(done["weight_version"], faults) from faults[0]
        return done["weight_version"]

    def _settle(self, checkpoint: Checkpoint) -> None:
        """All workers have these weights: from now on they are there for workers that start later."""
        before, self._newest = self._newest, checkpoint
        if before is not None:
            before.remove()
        if checkpoint.memory != "cuda":
            return
        kept = False
        try:
            if self._later is not None:
                began = time.monotonic()
                checkpoint.keep(self._later)
                self.spent.keep = time.monotonic() - began
                kept = True
        finally:
            if not kept:
                self._newest = None
                checkpoint.remove()

    @contextlib.contextmanager
    def paused(
        self, mode: Literal["abort", "wait", "keep"] = "keep", *, clear_cache: bool = True
    ) -> Iterator[None]:
        """No worker computes while it is open. The arguments are those of `/pause`. When a pause within
        another one ends, the outer one goes on. Raises RefusedUpdate."""
        self._pause(mode, clear_cache=clear_cache)
        outer, self._paused = self._paused, clear_cache
        try:
            yield
        finally:
            self._paused = outer
            if outer is None:
                self._call("/resume")
            else:
                self._pause("keep", clear_cache=outer)

    def _pause(self, mode: str, *, clear_cache: bool) -> None:
        self._call(f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}")

    def release_memory(self, *tags: Literal["kv_cache", "weights"]) -> None:
        """All workers give memory back until `resume_memory`, and compute nothing meanwhile. No tag: all.
        Raises RefusedUpdate if requests run, or if workers were not started for it."""
        self._call("/release_memory_occupation", {"tags": [*tags]})

    def resume_memory(self, *tags: Literal["kv_cache", "weights"]) -> None:
        """They take it again. Weights have lost their values: `update` must follow. Raises RefusedUpdate if
        the memory is not free."""
        self._call("/resume_memory_occupation", {"tags": [*tags]})

    def world_size(self) -> int:
        """Ranks of all workers."""
        return self._call("/get_world_size", method="GET")["world_size"]

    def close(self) -> None:
        """Removes the newest weights. Workers that start later get them only from workers that have them."""
        if self._newest is not None:
            self._newest.remove()
            self._newest = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def _call(self, path: str, body: Any = None, method: str = "POST") -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise RefusedUpdate(f"{path}: {_message(error)}") from error
        except urllib.error.URLError as error:
            raise RefusedUpdate(f"{self._url}: no router answers ({error.reason})") from error


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"status {error.code}"
