"""The GPUs of this machine. Does not import torch, which takes seconds."""

import functools
import os
import shutil
from pathlib import Path

from baton.cluster.gpu_pools import Gpu
from baton.processes import spawn


def nvidia_smi(*arguments: str) -> list[str] | None:
    """The output lines of nvidia-smi; None if there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    smi = spawn.run(*arguments, program="nvidia-smi", timeout=30)
    return smi.stdout.splitlines() if smi.returncode == 0 else None


def present_gpus() -> int:
    """How many GPUs the driver lists."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def visible_gpus() -> list[str]:
    """The GPUs that the driver lists and CUDA_VISIBLE_DEVICES does not hide, as names for that variable."""
    present = [str(number) for number in range(present_gpus())]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not present or chosen is None:
        return present
    return [name for name in chosen.replace(" ", "").split(",") if name not in ("", "-1")]


def told_of_gpus(*columns: str) -> dict[str, list[str]]:
    """What nvidia-smi tells of each of `visible_gpus`, by name. It leaves out those that it does not know."""
    query = f"--query-gpu=index,uuid,{','.join(columns)}", "--format=csv,noheader,nounits"
    rows = [[cell.strip() for cell in line.split(",")] for line in nvidia_smi(*query) or []]
    return {
        name: told
        for name in visible_gpus()
        for index, uuid, *told in rows
        if name == index or (name.startswith("GPU-") and uuid.startswith(name))
    }


def gpus_with_memory() -> list[Gpu]:
    """`visible_gpus` with their memory, as the driver tells it. Makes no context on them."""
    told = told_of_gpus("memory.total", "memory.used")
    return [
        Gpu(name, *(int(mib) / 1024 for mib in memory))
        if (memory := told.get(name)) and all(mib.isdecimal() for mib in memory)
        else Gpu(name)
        for name in visible_gpus()
    ]


def default_device() -> str:
    return "cuda" if visible_gpus() else "cpu"


@functools.cache  # it starts nvidia-smi
def gpu_gib() -> float | None:
    """Memory of the smallest GPU of this machine; None if no driver tells it."""
    lines = nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits") or []
    return min((int(line) / 1024 for line in lines if line.strip().isdecimal()), default=None)
