"""Server-sent events, by the rules of the HTML standard: what every client of `bench` reads answers with."""

MAX_EVENT_BYTES = 1 << 20


class SSEError(ValueError):
    """The bytes are not an event stream, or an event is too large."""


class SSEParser:
    """`feed` takes bytes and returns the data of each event that is complete, without empty events.

    Attributes:
        comments: how many comment lines have come, such as keepalives.
    """

    def __init__(self) -> None:
        self.comments = 0
        self._tail = b""

    def feed(self, data: bytes) -> list[bytes]:
        if not self._tail and data[:6] == b"data: " and data.find(b"\n") == len(data) - 2 and data[-1] == 10:
            return [data[6:-2]]  # one event in one chunk, the usual case
        data = self._tail + data if self._tail else data
        if b"\r" in data:
            # A CR at the very end may be half of a CRLF.
            half = b"\r" if data.endswith(b"\r") else b""
            data = data.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n") + half
        *blocks, self._tail = data.split(b"\n\n")
        if len(self._tail) > MAX_EVENT_BYTES:
            raise SSEError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return [event for block in blocks if (event := self._data_of(block)) is not None]

    def _data_of(self, block: bytes) -> bytes | None:
        lines = [line for line in block.split(b"\n") if line]
        fields = [_field(line) for line in lines if not line.startswith(b":")]
        self.comments += len(lines) - len(fields)
        data = [value for name, value in fields if name == b"data"]
        if not data and any(name not in (b"event", b"id", b"retry") for name, _ in fields):
            raise SSEError(f"not an event: {block[:80]!r}")
        return b"\n".join(data) if data else None


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name, value.removeprefix(b" ")
