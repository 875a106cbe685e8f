"""What `bench.kv` measures of exported memory: GPU to GPU, or shared memory on CPUs."""

import multiprocessing
import os
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

import baton.kv_transfer as kv
from baton.bench.lab.harness.processes import cpu_seconds
from baton.bench.lab.kv.pair import Settings
from baton.bench.lab.kv.raw_sockets import MIB
from baton.kv_transfer.arena import TOKEN
from baton.kv_transfer.config import SLOT_BYTES, SLOTS
from baton.kv_transfer.peer_memory import PeerArena, export_arena

SIZES = {"cpu": (64, 256), "cuda": (64, 256, 1024, 4096, 8192)}  # MiB
DEFAULT_SLOTS = SLOTS, SLOT_BYTES  # of workers
_SLOTS = {"cpu": DEFAULT_SLOTS, "cuda": (64, 32 * MIB)}  # a GPU copies large pieces faster
_PIECES, _PIECE = 4, 64 * MIB  # of a plain copy


def variants(device: str) -> dict[str, Settings]:
    """By the end of the row's name."""
    slots, slot_bytes = _SLOTS[device]
    kind = "shared_memory" if device == "cpu" else "cuda_ipc"
    large = Settings(4, slots, slot_bytes, max(SIZES[device]) * MIB, device=device, transport=kind)
    settings = {"": large}
    if _SLOTS[device] != DEFAULT_SLOTS:
        settings[".default_slots"] = replace(large, slots=DEFAULT_SLOTS[0], slot_bytes=DEFAULT_SLOTS[1])
    return settings


class PlainCopy:
    """Copies memory of a child process, as the receiver does, and does nothing else. Close it."""

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self._control, remote = context.Pipe()
        self._child = context.Process(target=_export, args=(remote, settings), daemon=True)
        self._child.start()
        export = self._control.recv()
        self._device = settings.device_of("decode")
        self._local = torch.empty(_PIECES, _PIECE, dtype=torch.uint8, device=self._device)
        self._peer: Any
        if settings.device == "cuda":
            from baton.kv_transfer.cuda_memory import PeerDeviceMemory

            torch.cuda.set_device(self._device)
            self._peer = PeerDeviceMemory(export)
        else:
            self._peer = PeerArena(export)

    def seconds(self, size: int) -> float:
        started = time.perf_counter()
        for i in range(-(-size // _PIECE)):
            local, count = self._local[i % _PIECES], min(_PIECE, size - i * _PIECE)
            remote = self._peer.slot(i % _PIECES)
            if self._device == "cpu":
                local.numpy()[:count] = np.frombuffer(remote, np.uint8, count)
            else:
                from baton.system.cuda_driver import copy

                copy(local.data_ptr(), remote, count, torch.cuda.current_stream().cuda_stream)
        if self._device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def cpu_seconds(self) -> float:
        return cpu_seconds(os.getpid())

    def close(self) -> None:
        self._peer.close()
        self._control.send(None)
        self._child.join()


def _export(control: Connection, settings: Settings) -> None:
    if settings.device == "cuda":
        from baton.kv_transfer.cuda_memory import ExportedMemory

        torch.cuda.set_device(settings.device_of("prefill"))
        torch.empty(1, device="cuda")
        control.send(ExportedMemory(_PIECES, _PIECE, bytes(TOKEN)).export)
    else:
        arena = kv.Arena.create(_PIECES, _PIECE)
        for i in range(_PIECES):
            arena.slot(i)[:] = bytes(range(256)) * (_PIECE // 256)
        control.send(export_arena(arena))
    control.recv()
