"""Connects the engine process of a worker with the connectors, in processes of vLLM that inherit nothing.

1. The engine process makes a `ConnectorLink`. Its `path` gets to the connector by vLLM's configuration.
2. The connector, once vLLM has its KV cache, opens a `WorkerLink`. It says what the KV looks like (`Attach`),
   and gets the arenas and the heartbeat.
3. `ConnectorLink.attached` returns. Then the service can start the transfer process.
4. Messages go both ways until one of the processes ends. vLLM's processes with connectors die with their
   parents.

The constructor of vLLM's engine returns after step 3, so it runs in a thread beside `attached`. If the engine
cannot start, `attached` may not return. A process that vLLM starts dies with the *thread* that started it:
this must be a thread that lives as long as the engine process.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

import baton.kv_transfer as kv
from baton.kv_transfer.channel import Channel
from baton.kv_transfer.protocol.local_messages import Local
from baton.kv_transfer.protocol.messages import FirstToken, Reason
from baton.vllm_worker.metadata import BlockTable, FromScheduler

_MOST_BYTES = 1 << 16
_MOST_DESCRIPTORS = 250
"""SCM_MAX_FD is 253."""
_ATTACHED_WITHIN = 60.0
"""Seconds for the engine process to answer. It also starts vLLM meanwhile."""


class Pool(Local):
    """vLLM's pool of blocks, as if a request had one block table."""

    block_size: int
    """Tokens of which each group has whole blocks."""
    num_blocks: int
    weight: int = 1
    """Blocks of vLLM in one of these."""
    bounded: tuple[tuple[int, int], ...] = ()
    """Of each group that keeps less than all tokens of a request: tokens of a block of vLLM, and most
    blocks."""
    complete: int = 0
    """The number of a group that keeps all tokens, if there is one."""
    tables: tuple[BlockTable, ...] = ()
    """Of all groups, if prefixes move between workers: a group keeps all tokens, and blocks of all groups are
    equally long and do not cut a chunk, or are not cut by one."""


class Attach(Local):
    """Connector → engine process, first: what the KV cache of a rank looks like."""

    rank: int
    layout: kv.KVLayout  # of all ranks
    pool: Pool
    model_fingerprint: str
    sums: bool = False  # as in `TransferConfig`


class Close(Local):
    """Engine process → connector: the router needs the prefill no more. `Released` follows if its blocks are
    in use. vLLM itself tells the connector of prefills that begin, and that it aborts."""

    prefill_id: bytes
    reason: Reason = "cancelled"  # "finished": the first token is the last


class Commit(Local):
    """Engine process → connector: the first token of a prefill. vLLM's scheduler would show it without log
    probabilities and up to a step later, since it has scheduled the next step by then."""

    prefill_id: bytes
    first_token: FirstToken


class OnDevice(Local):
    """Connector → engine process: vLLM has moved an adapter to the device."""

    numbers: list[int]
    """Of all adapters that are there now."""
    seconds: float
    """That the move took."""


ToConnector = Close | Commit
FromConnector = (
    FromScheduler | OnDevice | kv.ContentWanted | kv.Injected | kv.FetchFailed | kv.Closed | kv.Released
)
_encode = msgspec.msgpack.Encoder().encode


def events_address(connector: str, rank: int = 0) -> str:
    """Where vLLM publishes what enters and leaves its prefix cache: beside the connector's socket.

    vLLM gets the address of rank 0. To what it takes for a port it adds the rank of the engine in its group,
    and it knows only addresses with "tcp" or "inproc" in them."""
    return f"ipc://{Path(connector).with_name(f'tcp:{1 + rank}')}"


class ConnectorLink:
    """The engine process's end. All methods are for its event loop.

    Owns the descriptors of `arenas`, one for each rank, until the connectors have them.

    Args:
        directory: of mode 0700. The service made it, and removes it when this process is ready or has ended.
            No name in it is longer than that of the service's socket.
    """

    def __init__(self, arenas: Sequence[kv.Arenas], heartbeat_fd: int, directory: Path) -> None:
        self._arenas = arenas
        self._heartbeat_fd = heartbeat_fd
        self.path = str(directory / "vllm")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.setblocking(False)
        self._channels: dict[int, Channel] = {}  # by rank

    async def attached(self) -> Attach:
        """Gives each connector the arenas of its rank. Returns what rank 0 said.

        Raises ValueError if one ends, or says what no rank of this worker says. Those that wait for an answer
        get an error, so vLLM does not start."""
        loop, first = asyncio.get_running_loop(), None
        with self._listener:
            while len(self._channels) < len(self._arenas):
                connector, _ = await loop.sock_accept(self._listener)
                try:
                    if _uid_of_peer(connector) != os.getuid():
                        connector.close()
                        continue
                    data = await loop.sock_recv(connector, _MOST_BYTES)
                    said = msgspec.msgpack.decode(data, type=Attach)
                    if said.rank in self._channels or said.rank >= len(self._arenas):
                        raise ValueError(f"there are {len(self._arenas)} ranks")
                    arenas = self._arenas[said.rank]
                    socket.send_fds(connector, [_encode(arenas)], [*arenas.fds, self._heartbeat_fd])
                except (OSError, ValueError, msgspec.DecodeError) as error:
                    connector.close()
                    raise ValueError(f"a connector of vLLM does not attach: {error}") from error
                self._channels[said.rank] = Channel(connector, FromConnector, self._blocked)
                if said.rank == 0:
                    first = said
        # The channels must show the end of the process that uses them, so no other one keeps them open. Ranks
        # share the memory.
        for fd in {fd for arenas in self._arenas for fd in arenas.fds}:
            os.close(fd)
        assert first is not None, "each rank has attached"
        return first

    def send(self, message: ToConnector) -> None:
        """Raises ChannelClosed if the connector's process has ended."""
        self._channels[0].send(message)

    async def receive(self) -> Sequence[FromConnector]:
        """Returns the next messages. Raises ChannelClosed if the connector's process has ended."""
        channel, loop, readable = self._channels[0], asyncio.get_running_loop(), asyncio.Event()
        while not (messages := channel.receive()):
            readable.clear()
            loop.add_reader(channel, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(channel)
        return messages

    def close(self) -> None:
        self._listener.close()
        for channel in self._channels.values():
            channel.sock.close()

    def _blocked(self) -> None:
        """The connector does not read. vLLM's step may hold Python's lock for long."""
        loop, channel = asyncio.get_running_loop(), self._channels[0]

        def flush() -> None:
            loop.remove_writer(channel)
            channel.flush()

        loop.add_writer(channel, flush)


@dataclass(frozen=True, slots=True)
class WorkerLink:
    """The connector's end. Owns the descriptors."""

    arenas: kv.Arenas
    heartbeat: kv.Heartbeat
    channel: Channel

    @classmethod
    def open(cls, path: str, attach: Attach) -> WorkerLink:
        """Returns when the engine process has answered. Raises OSError if it ends, or does not answer."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(_ATTACHED_WITHIN)
        sock.connect(path)
        sock.sendall(_encode(attach))
        data, fds, _, _ = socket.recv_fds(sock, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not data:
            raise ConnectionResetError(f"{path}: the worker ended")
        arenas = msgspec.msgpack.decode(data, type=kv.Arenas).with_fds(fds[:-1])
        return cls(arenas, kv.Heartbeat(fds[-1]), Channel(sock, ToConnector))


def _uid_of_peer(sock: socket.socket) -> int:
    credentials = struct.Struct("3i")  # pid, uid, gid
    return credentials.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))[1]
