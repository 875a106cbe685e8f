"""The GPUs of this machine. Does not import torch, which takes seconds."""

import functools
import os
import shutil
import subprocess
from pathlib import Path


def nvidia_smi(*arguments: str) -> list[str] | None:
    """The output lines of nvidia-smi; None if there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    out = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=False)
    return out.stdout.splitlines() if out.returncode == 0 else None


def visible_gpus() -> list[str]:
    """The GPUs that the driver lists and CUDA_VISIBLE_DEVICES does not hide, as names for that variable."""
    present = [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not present or chosen is None:
        return present
    return [name for name in chosen.replace(" ", "").split(",") if name not in ("", "-1")]


def default_device() -> str:
    return "cuda" if visible_gpus() else "cpu"


@functools.cache  # it starts nvidia-smi
def gpu_gib() -> float | None:
    """Memory of the smallest GPU of this machine; None if no driver tells it."""
    found = nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits") or []
    return min((int(line) / 1024 for line in found if line.strip().isdecimal()), default=None)
