"""A worker whose ranks are processes, so that each can die or hang.

They are forked from a process that has imported torch and has one thread (`multiprocessing`'s fork server):
this takes some 30 ms for each.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any, Literal

import torch

import baton.kv_transfer as kv
from baton.kv_transfer.channel import ChannelClosed
from baton.kv_transfer.endpoint import ranked_pool
from baton.kv_transfer.endpoint.rank_copier import RankCopier
from baton.kv_transfer.spawn import die_with_parent
from baton.kv_transfer.transport import PagedKV
from baton.kv_transfer.wait import wait

from .transfer_process import TransferProcess

Side = Literal["prefill", "decode"]
BLOCKS, BLOCK_SIZE = 8, 16
CONTEXT = multiprocessing.get_context("forkserver")


class _Inherited:
    """An end or a heartbeat, as an argument of a process."""

    def __init__(self, make: Callable[..., Any], fds: list[int], *args: int) -> None:
        self._parts = make, fds, args

    def __reduce__(self) -> Any:
        make, fds, args = self._parts
        return _inherit, (make, [DupFd(fd) for fd in fds], args)


def _inherit(make: Callable[..., Any], fds: list[Any], args: tuple[int, ...]) -> Any:
    return make([fd.detach() for fd in fds], *args)


def _heartbeat(fds: list[int]) -> kv.Heartbeat:
    return kv.Heartbeat(*fds)


class GroupProcess(TransferProcess):
    """Owns the processes of the ranks. `order` tells them what to do, as a step or a scheduler does."""

    def __init__(self, side: Side, size: int, layout: kv.KVLayout, **config: Any) -> None:
        super().__init__(layout, name=f"{side} with {size} processes", **config)
        heartbeat = _Inherited(_heartbeat, [self.heartbeat.fd])
        (sending, out), (receiving, into) = (end.of_ranks(size) for end in (self.sending, self.receiving))
        self._error = ""
        self.commands: list[Connection] = []
        self.ranks: list[BaseProcess] = []
        for rank, ends in enumerate(zip([sending, *out], [receiving, *into], strict=True)):
            ours, theirs = CONTEXT.Pipe()
            inherited = [
                _Inherited(kv.ArenaEnd.inherited, [*end.fds], end.arena.num_slots, end.arena.slot_bytes)
                for end in ends
            ]
            args = (rank, size, layout, inherited, theirs, side, heartbeat)
            self.ranks.append(CONTEXT.Process(target=_run, args=args, daemon=True))
            self.ranks[-1].start()
            self.commands.append(ours)
            theirs.close()
        for end in (sending, receiving, *out, *into):
            end.close_channels()

    def order(self, rank: int, name: str, *args: Any) -> None:
        """Calls a method of the rank. Rank 0 has carried it out then, unless it has failed."""
        with suppress(BrokenPipeError):
            self.commands[rank].send((name, args))
        if rank == 0:
            self._hear()

    def strike(self, rank: int, how: signal.Signals) -> None:
        pid = self.ranks[rank].pid
        assert pid is not None
        os.kill(pid, how)
        if how is signal.SIGKILL:
            self.ranks[rank].join()

    def error(self) -> str:
        """Waits until rank 0 fails."""
        while not self._error:
            self._hear()
        return self._error

    def _hear(self) -> None:
        assert self.commands[0].poll(20), "rank 0 does nothing"
        with suppress(EOFError, ConnectionResetError):  # it has ended, and its error was read before
            self._error = self.commands[0].recv()

    def kill(self) -> None:
        """All processes, as the service process does when one of them fails."""
        self.process.kill()
        for rank in self.ranks:
            rank.kill()
        for rank, commands in zip(self.ranks, self.commands, strict=True):
            rank.join()
            commands.close()

    def close(self) -> None:
        self.kill()
        self.stop()


def _run(
    rank: int, size: int, layout: kv.KVLayout, ends: list[kv.ArenaEnd], commands: Connection, side: Side,
    heartbeat: kv.Heartbeat,
) -> None:  # fmt: skip
    """The process of a rank. It ends with pytest, also while it is stopped."""
    die_with_parent(os.getppid())
    torch.set_num_threads(1)
    first, last = layout.parts[0].heads_of(rank, size)
    shape = (2, BLOCKS, BLOCK_SIZE, last - first, layout.head_dim)
    caches = [torch.zeros(shape) for _ in layout.kv_layers]
    ready: list[int] = []
    paged = PagedKV(caches, BLOCK_SIZE, layout, "cpu", rank, size, lambda: len(ready))
    sending, receiving = ends
    if rank:
        copier = RankCopier(paged, sending, receiving)
        while True:
            name, args = commands.recv()
            getattr(copier, name)(*args)
    transport = kv.Transport(sending, receiving, kv.TraceWriter(None, ""))
    leader: Any = (_Prefill if side == "prefill" else _Decode)(transport, paged, ready)
    try:
        while True:
            wait([commands.fileno(), leader.end.fileno()], 0.05)
            heartbeat.tick()
            while commands.poll():
                name, args = commands.recv()
                getattr(leader, name)(*args)
                commands.send("")
            leader.end.poll()
    except (RuntimeError, ChannelClosed) as error:
        traceback.print_exception(error)
        commands.send(repr(error.__cause__ or error))
        os._exit(1)


class _Rank0:
    def silence(self, seconds: float) -> None:
        """From now on, another rank that copies nothing for so long hangs."""
        ranked_pool.SILENCE = seconds


class _Prefill(_Rank0):
    def __init__(self, transport: kv.Transport, paged: PagedKV, ready: list[int]) -> None:
        self.end = transport.sender(paged)
        self._ready = ready

    def open(self, prefill_id: bytes, num_tokens: int) -> None:
        self._prefill = prefill_id, num_tokens
        self.end.open(prefill_id, _blocks(num_tokens), num_tokens)

    def layer_done(self, layer: int) -> None:
        prefill_id, num_tokens = self._prefill
        self._ready.append(layer)
        self.end.ready(prefill_id, layer, 0, num_tokens)

    def commit(self) -> None:
        self.end.commit(self._prefill[0], kv.FirstToken(1))


class _Decode(_Rank0):
    def __init__(self, transport: kv.Transport, paged: PagedKV, ready: list[int]) -> None:
        self.end = transport.receiver(paged)

    def fetch(self, decode_id: bytes, num_tokens: int, where: dict[str, Any]) -> None:
        self.end.fetch(decode_id, block_ids=_blocks(num_tokens), num_tokens=num_tokens, attempt=0, **where)


def _blocks(num_tokens: int) -> list[int]:
    return [*range(-(-num_tokens // BLOCK_SIZE))]
