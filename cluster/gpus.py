"""The GPUs of this machine, without torch, whose import takes seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

LARGE_GPU_MIB = 70 * 1024
"""From this much memory on, a GPU gets the batch sizes of servers (those of vLLM, too)."""


class BatchSizes(NamedTuple):
    max_num_seqs: int
    max_num_batched_tokens: int


LARGE = BatchSizes(256, 8192)
SMALL = BatchSizes(64, 2048)


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


def batch_sizes(device: str) -> BatchSizes:
    """The defaults of `--max-num-seqs` and `--max-num-batched-tokens` for a device."""
    if device == "cpu":
        return SMALL
    found = nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits") or []
    sizes = [int(line) for line in found if line.strip().isdecimal()]
    return LARGE if sizes and min(sizes) >= LARGE_GPU_MIB else SMALL
