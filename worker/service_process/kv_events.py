"""Publishes events about the prefix cache by ZeroMQ, as vLLM does: the parts of a message are a topic, the
number of the batch in 8 bytes (big-endian), and the batch in MessagePack. Without authentication."""

from itertools import count

import zmq

MOST_BATCHES = 10_000
"""That wait for one subscriber. It misses later ones, and sees that by their numbers."""


class KVEventPublisher:
    def __init__(self, endpoint: str, topic: str = "") -> None:
        """Raises ValueError if the address cannot be used."""
        self._topic = topic.encode()
        self._numbers = count()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(MOST_BATCHES)
        self._socket.setsockopt(zmq.IPV6, 1)  # addresses of IPv4 as before, and those of IPv6
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(
                f"--advanced.kv-events-endpoint {endpoint}: {error}; give an address of this machine, "
                "as tcp://[::]:5557"
            ) from error

    def publish(self, batch: bytes) -> None:
        """Never waits."""
        self._socket.send_multipart([self._topic, next(self._numbers).to_bytes(8), batch])

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
