"""The socket between the service process and its engine process: ZMQ PAIR over a Unix socket, typed messages.

The socket lives in a directory of mode 0700 for as long as it takes the engine to connect; then both are
removed, so that not even `kill -9` leaves a file. Both directions are bounded. A service that sends faster
than the engine reads waits, and with it the routers; an engine whose service does not read for
`SEND_TIMEOUT` gives up.
"""

import shutil
import tempfile

import zmq
import zmq.asyncio

from worker import messages
from worker.failure import StartError
from worker.messages import Exit, FromEngine, ToEngine

MAX_MESSAGE_BYTES = 16 << 20
MAX_QUEUED = 4096
SEND_TIMEOUT = 10.0


def _bound(socket: zmq.Socket | zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


class EngineLink:
    """The service's end. Owns the directory, made in `run_dir`, and the listening socket."""

    def __init__(self, run_dir: str | None) -> None:
        try:
            self._directory: str | None = tempfile.mkdtemp(prefix="baton-", dir=run_dir)
        except OSError as error:
            raise StartError(f"--run-dir {run_dir}: {error.strerror}") from error
        self.address = f"ipc://{self._directory}/engine"
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PAIR)
        _bound(self._socket)
        self._socket.bind(self.address)

    async def send(self, message: ToEngine) -> None:
        await self._socket.send(messages.encode(message))

    async def receive(self) -> FromEngine:
        return messages.decode_from_engine(await self._socket.recv())

    def remove_directory(self) -> None:
        """Once the engine has connected, which its first message proves. Idempotent."""
        if self._directory is not None:
            shutil.rmtree(self._directory)
            self._directory = None

    def close(self) -> None:
        self._context.destroy(linger=0)
        self.remove_directory()


class ServiceLink:
    """The engine's end: never waits to receive, and to send only when the service is far behind."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PAIR)
        _bound(self._socket)
        self._socket.setsockopt(zmq.SNDTIMEO, int(SEND_TIMEOUT * 1000))
        self._socket.connect(address)

    def fileno(self) -> int:
        """Becomes readable when `has_messages` may have changed: to be looked at before each wait."""
        return self._socket.fileno()

    @property
    def has_messages(self) -> bool:
        return bool(self._socket.poll(0))

    def send(self, message: FromEngine) -> None:
        """Raises zmq.Again when the service has not read for SEND_TIMEOUT."""
        self._socket.send(messages.encode(message))

    def receive_all(self) -> list[ToEngine]:
        """What has arrived, in order; at most MAX_QUEUED, so that a flood cannot keep the engine from its
        steps."""
        arrived: list[ToEngine] = []
        while len(arrived) < MAX_QUEUED:
            try:
                arrived.append(messages.decode_to_engine(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        return arrived

    def wait_for_exit(self) -> None:
        """Drops what comes before Exit. Should the service die in between, so does this process."""
        while not isinstance(messages.decode_to_engine(self._socket.recv()), Exit):
            pass

    def close(self) -> None:
        """Waits a second for what is queued to leave."""
        self._socket.close(linger=1000)
        self._context.term()
