"""Reads memory of peers with NIXL: `--kv-connector nixl`."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from baton.kv_transfer.arena import Arena
from baton.kv_transfer.config import TransferConfig
from baton.kv_transfer.memory_reader import MemoryReader, ReaderKind

WHEELS = ("nixl_cu13", "nixl_cu12")  # the package `nixl` would import torch to choose one of them


def installed() -> bool:
    return any(find_spec(name) for name in WHEELS)


def nics_read_gpus() -> bool:
    """RDMA devices here can read memory of GPUs: with nvidia_peermem, or by dma-buf, which NVIDIA's open
    kernel modules have."""
    driver = Path("/proc/driver/nvidia/version")
    is_open = driver.exists() and "Open Kernel Module" in driver.read_text()
    return any(Path("/sys/class/infiniband").glob("*")) and (
        is_open or Path("/sys/module/nvidia_peermem").exists()
    )


class Kind(ReaderKind):
    transports = ("nixl", "nixl_cuda")

    def check(self, *, encrypt: bool) -> None:
        if encrypt:
            raise ValueError("--kv-encrypt: NIXL does not encrypt; use another --kv-connector")
        if not installed():
            raise ValueError(
                "--kv-connector: NIXL is not installed; run `pip install -e '.[nixl]'` in Baton's source "
                "directory"
            )

    def device_of(self, engine_device: str) -> str | None:
        """From GPU to GPU where NICs read their memory."""
        kind, _, number = engine_device.partition(":")
        return f"cuda:{number or 0}" if kind == "cuda" and nics_read_gpus() else None

    def open(
        self, config: TransferConfig, secret: bytes, sending: Arena, receiving: Arena,
        wake: Callable[[], None],
    ) -> MemoryReader:  # fmt: skip
        from baton.kv_transfer.nixl.memory import NixlMemory, listen_on

        listen_on(config.host)
        return NixlMemory(
            secret, config.incarnation, sending, receiving, device=config.reader_device,
            slot_bytes=config.exported_slot_bytes, wake=wake,
        )  # fmt: skip
