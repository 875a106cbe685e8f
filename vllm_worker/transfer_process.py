"""The process with the sockets of a vLLM server without a worker of Baton."""

import asyncio
import contextlib
import os
import subprocess
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from baton.kv_transfer import Heartbeat, PagedKV, TransferConfig, WorkerEnds, channel_pair, spawn_transfer
from baton.kv_transfer.config import SLOT_BYTES, SLOTS
from baton.kv_transfer.spawn import MAX_MESSAGE, Ready, decode_from_transfer
from baton.system.addresses import url_host
from baton.vllm_worker.attachment import ConnectorLink
from baton.vllm_worker.mixed_steps import LONG

_TICK = 0.25
"""Seconds between signs of life to the transfer process."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user may set in `kv_connector_extra_config`."""

    host: str = "127.0.0.1"
    """Address of this machine at which decode servers fetch KV."""
    port: int = 0
    """0: one is chosen. Of several engines (data parallel) each adds its rank."""
    lanes: int = 4
    slots: int = SLOTS
    slot_bytes: int = SLOT_BYTES
    encrypt: bool = False
    timeout: float = 60.0
    """Seconds for the KV of a request to come. Then its prompt is computed here."""
    attach: str = ""
    """Socket of a worker (`attachment`), which has a transfer process, and needs no setting above."""
    itl_target: float | None = None
    itl_target_steps: float = LONG
    """With `attach`: as in the configuration of Baton's engine."""
    untested: bool = False
    """Start also with a version of vLLM that Baton was not tested with."""

    def of_rank(self, rank: int) -> Self:
        """Those of an engine of a server with several (`--data-parallel-size`)."""
        return replace(self, port=self.port + rank if self.port else 0)


class TransferProcess:
    """The process with the sockets, as a child of the process of rank 0. The connector of each rank attaches
    to `path`, as to that of a worker."""

    def __init__(self, kv: PagedKV, settings: Settings, name: str, model: str, secret: bytes) -> None:
        """`kv`: of rank 0. Returns when the process can be reached. Raises ValueError if the settings are
        wrong, and RuntimeError if the process ends."""
        incarnation = int.from_bytes(os.urandom(8))
        self._heartbeat = Heartbeat.create()
        self._heartbeat.tick()
        ends = WorkerEnds.create(settings.slots, settings.slot_bytes, kv.ranks)
        self._service, service = channel_pair()
        config = TransferConfig(
            name=name, title="baton vllm", incarnation=incarnation, model_fingerprint=model,
            layout=kv.layout, num_slots=settings.slots, slot_bytes=settings.slot_bytes,
            hosts=(settings.host,), port=settings.port, lanes=settings.lanes, encrypt=settings.encrypt,
            exports=True, sums=kv.sums,
        )  # fmt: skip
        sending, receiving = ends.transfer
        self.process: subprocess.Popen[bytes] = spawn_transfer(
            config, sending=sending, receiving=receiving, heartbeat=self._heartbeat, service=service,
            secret=secret,
        )  # fmt: skip
        data = self._service.recv(MAX_MESSAGE)
        if not data:
            raise RuntimeError(f"{name}: the transfer process ended with exit code {self.process.wait()}")
        ready = decode_from_transfer(data)
        assert isinstance(ready, Ready), ready
        self.address = f"{url_host(settings.host)}:{ready.port}", incarnation
        self._directory = TemporaryDirectory(prefix="baton-")
        arenas = ends.copied(exports=True, adopts=False)
        ends.close()
        self._link = ConnectorLink(arenas, self._heartbeat.fd, Path(self._directory.name))
        self.path = self._link.path
        threading.Thread(target=self._attach, name="baton attach", daemon=True).start()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="baton heartbeat", daemon=True)
        self._thread.start()

    def _attach(self) -> None:
        asyncio.run(self._link.attached())
        self._directory.cleanup()

    def _tick(self) -> None:
        """Shows the transfer process that this process lives, and reads its reports."""
        self._service.settimeout(_TICK)
        while not self._ended.is_set():
            self._heartbeat.tick()
            with contextlib.suppress(TimeoutError):
                if not self._service.recv(MAX_MESSAGE):
                    return

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._service.close()  # which ends the process
        self.process.wait()
        self._link.close()
