"""The socket between the service process and its engine process: ZMQ PAIR over a Unix socket, typed messages.

The socket file is in a directory of mode 0700. Both are removed when the engine has connected, so that even
`kill -9` leaves no file. Both directions are bounded. If the engine reads too slowly, the service process
waits, and the routers with it. If the service process does not read for `SEND_TIMEOUT`, the engine process
ends.
"""

import asyncio
import errno
import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import zmq

from baton.vision.images import CHANNELS, MOST_PIXELS
from baton.worker import messages
from baton.worker.messages import Exit, FromEngine, Stopped, TakeOver, ToEngine

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the directory there has a name of its own and mode 0700
MAX_MESSAGE_BYTES = (16 << 20) + CHANNELS * MOST_PIXELS  # a message of a router, and images
MAX_QUEUED = 4096
SEND_TIMEOUT = 10.0  # seconds
_COPIED = 1 << 20
"""Bytes from which a message is sent without a copy: it may hold megabytes of pixels. Less, such as the ids
of a prompt, is copied in less time than pyzmq's thread takes to free it."""


def _bound(socket: zmq.Socket) -> None:
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


class EngineLink:
    """The service's end. Owns the listening socket and its directory, which it makes in `run_dir`, or in
    shared memory if that is full: a full disk must not keep a worker from starting again. The engine process
    may make further sockets there.

    Raises ValueError if the directory cannot be made, or no descriptor is left.
    """

    def __init__(self, run_dir: str | None) -> None:
        self._directory: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that watches the socket
        self._arrived = deque[bytes]()
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._deliver: Callable[[FromEngine], None] = lambda _: None
        self._stopped: asyncio.Future[None] | None = None
        context: zmq.Context[zmq.Socket[bytes]] | None = None
        try:
            self._context = context = zmq.Context(io_threads=1)
            self._socket = context.socket(zmq.PAIR)
        except zmq.ZMQError as error:
            if context is not None:
                self.close()
            raise ValueError(f"no socket for the engine process: {error.strerror}") from error
        _bound(self._socket)
        try:
            self._listen(run_dir)
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise ValueError(f"--advanced.run-dir {run_dir}: {error.strerror}") from error

    def _listen(self, parent: str | None) -> None:
        try:
            self._directory = tempfile.mkdtemp(prefix="baton-", dir=parent)
            self.address = f"ipc://{self._directory}/engine"
            self._socket.bind(self.address)
        except (OSError, zmq.ZMQError) as error:
            self.remove_directory()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or parent == _SHARED_MEMORY:
                raise
            self._listen(_SHARED_MEMORY)

    async def send(self, message: ToEngine) -> None:
        """Waits while the engine reads too slowly. Returns, too, if the link is closed meanwhile."""
        data = messages.encode(message)
        while not self._socket.closed:
            self._watch()
            try:
                self._socket.send(data, zmq.NOBLOCK, copy=len(data) < _COPIED)
            except zmq.Again:
                self._room.clear()
                await self._room.wait()
            else:
                # Sending takes the signal of messages that arrived meanwhile.
                asyncio.get_running_loop().call_soon(self._turn)
                return

    async def receive(self) -> FromEngine:
        self._watch()
        while not self._arrived:
            self._news.clear()
            await self._news.wait()
        return messages.decode_from_engine(self._arrived.popleft())

    async def receive_all(self, deliver: Callable[[FromEngine], None]) -> None:
        """Passes on each message of the engine until its last one, `Stopped`. Raises what `deliver` does."""
        self._watch()
        self._deliver, self._stopped = deliver, asyncio.get_running_loop().create_future()
        self._turn()  # for what came before
        await self._stopped

    def _watch(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.fileno(), self._turn)
            self._loop.call_soon(self._turn)  # for what came before

    def _turn(self) -> None:
        """The socket has messages, or room for some, or neither. Passes the messages on, once `receive_all`
        wants them."""
        if self._socket.closed:
            return
        with suppress(zmq.Again):
            for _ in range(MAX_QUEUED):
                self._arrived.append(self._socket.recv(zmq.NOBLOCK))
        if len(self._arrived) >= MAX_QUEUED:
            asyncio.get_running_loop().call_soon(self._turn)
        self._news.set()
        self._room.set()  # a sender tries again
        if self._stopped is None or self._stopped.done():
            return
        try:
            while self._arrived:
                message = messages.decode_from_engine(self._arrived.popleft())
                if isinstance(message, Stopped):
                    self._stopped.set_result(None)
                    return
                self._deliver(message)
        except Exception as error:  # noqa: BLE001  (`receive_all` raises it)
            self._stopped.set_exception(error)

    def remove_directory(self) -> None:
        """Removes the socket file and its directory. Idempotent.

        The engine must be ready: then all sockets are connected.
        """
        if self._directory is not None:
            shutil.rmtree(self._directory)
            self._directory = None

    def close(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._context.destroy(linger=0)
        self._room.set()
        self.remove_directory()


class ServiceLink:
    """The engine's end. It never waits to receive, and waits to send only if the queue is full."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PAIR)
        _bound(self._socket)
        self._socket.setsockopt(zmq.SNDTIMEO, int(SEND_TIMEOUT * 1000))
        self._socket.connect(address)

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable when `has_messages` may have changed.

        The caller must check `has_messages` before each wait, because ZMQ signals are edge-triggered.
        """
        return self._socket.fileno()

    @property
    def has_messages(self) -> bool:
        events = self._socket.get(zmq.EVENTS)
        return isinstance(events, int) and bool(events & zmq.POLLIN)

    def send(self, message: FromEngine) -> None:
        """Raises zmq.Again if the service process has not read for SEND_TIMEOUT."""
        self._socket.send(messages.encode(message))

    def receive_all(self) -> list[ToEngine]:
        """Returns the messages that have arrived, in order.

        Returns at most MAX_QUEUED messages, so that a flood cannot delay the engine's steps for long.
        """
        arrived: list[ToEngine] = []
        while len(arrived) < MAX_QUEUED and self.has_messages:  # a `recv` in vain takes four times as long
            arrived.append(messages.decode_to_engine(self._socket.recv(zmq.NOBLOCK)))
        return arrived

    def wait_for(self, kind: type[Exit | TakeOver]) -> None:
        """Waits for a message of this kind and drops all others.

        If the service process dies, this process dies, too.
        """
        while not isinstance(messages.decode_to_engine(self._socket.recv()), kind):
            pass

    def close(self) -> None:
        """Closes the socket. Waits at most a second until the queued messages are sent."""
        self._socket.close(linger=1000)
        self._context.term()
