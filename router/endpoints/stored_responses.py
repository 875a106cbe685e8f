"""The responses of /v1/responses that clients may ask for again, in the memory of this router process."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import msgspec
import xxhash

from baton.router.admission.keys import ANY_CLIENT
from baton.router.errors import BodyTooLarge, NotFound
from baton.system import memory_share

MAX_RESPONSES = 1000
"""Of each API key."""
MAX_BYTES = 256 << 20
"""Of all API keys together, and at most a sixteenth of the memory. Each has an equal part."""
MAX_SECONDS = 24 * 3600.0
_EVENT_BYTES = 48
"""Of memory for each event, beside its text: a bytes object, and its place in a list."""


def home_tag(address: str) -> str:
    """How the ids of all responses begin that the router at `address` ("IP:PORT") makes.

    An endpoint picker sends a request that names a response there. The tag is short, so that it does not tell
    clients the address. The ids of different routers may begin alike; then the picker may be wrong.
    """
    return f"resp_{xxhash.xxh3_64_intdigest(address.encode()) & 0xFFFF:04x}"


class _Named(msgspec.Struct):
    id: str


_parts = msgspec.json.Decoder(list[msgspec.Raw]).decode
_named = msgspec.json.Decoder(_Named).decode


class Events:
    """The events of a response in the background, for all clients that follow it.

    The place of an event is its sequence number.

    Attributes:
        bytes: of memory that they take.
    """

    def __init__(self) -> None:
        self.all: list[bytes] = []
        self.bytes = 0
        self.ended = False
        self._new = asyncio.Event()

    def add(self, new: list[bytes]) -> None:
        self.all += new
        self.bytes += sum(map(len, new)) + len(new) * _EVENT_BYTES
        if new:
            self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        self._new.set()
        self._new = asyncio.Event()

    async def wait(self, seconds: float) -> bool:
        """Waits for the next event. Returns False if none came in this time."""
        try:
            async with asyncio.timeout(seconds):
                return await self._new.wait()
        except TimeoutError:
            return False


@dataclass(frozen=True, slots=True)
class StoredResponse:
    response: bytes
    """JSON."""
    conversation: tuple[bytes, ...]
    """The inputs and outputs up to this response, each as the JSON of an `input`. Responses share them."""
    background: bool
    items: tuple[str, ...] = ()
    """The ids of its output items."""
    events: Events | None = None
    """Those of a stream in the background. Its last event, which holds the response, may follow later."""

    @property
    def size(self) -> int:
        events = 0 if self.events is None else len(self.response) + self.events.bytes
        return len(self.response) + sum(map(len, self.conversation)) + events


class StoredResponses:
    """Keeps the newest responses of each API key. A key never sees those of another."""

    def __init__(
        self, keys: Callable[[], Set[str]], clock: Callable[[], float] = time.monotonic, processes: int = 1
    ) -> None:
        """`keys`: returns the names of the API keys. `processes`: how many of a router keep responses."""
        self._keys = keys
        self._most = memory_share(16 * processes, MAX_BYTES)
        self._clock = clock
        self._of_key: dict[str, _Shelf] = {}

    def put(self, key: str, id: str, response: StoredResponse) -> None:
        """Keeps a response. Drops the oldest ones as far as a bound demands it."""
        for gone in self._of_key.keys() - self._keys():
            del self._of_key[gone]
        self._of_key.setdefault(key, _Shelf()).put(id, response, self._clock() + MAX_SECONDS)
        for shelf in self._of_key.values():
            shelf.shrink(self._max_bytes, self._clock())

    @property
    def _max_bytes(self) -> int:
        return self._most // max(1, len(self._keys() - {ANY_CLIENT.name}))

    def get(self, key: str, id: str, param: str | None = None) -> StoredResponse:
        """Raises NotFound, which names `param`."""
        shelf = self._of_key.get(key)
        if shelf is not None:
            shelf.shrink(self._max_bytes, self._clock())
        if shelf is None or id not in shelf.responses:
            limits = f"the last {MAX_RESPONSES} of a key, at most {self._max_bytes >> 20} MiB of them"
            text = (
                f"Response with id {id[:80]!r} not found: a router process keeps the responses that it made, "
                f"{limits}, for {MAX_SECONDS / 3600:g} h, unless store was false"
            )
            raise NotFound(text, param=param)
        return shelf.responses[id][0]

    def items(self, key: str, ids: Sequence[str], most: int) -> dict[str, bytes]:
        """Returns output items of stored responses as JSON, by their ids.

        Raises NotFound, and BodyTooLarge if the items, repeated ones included, or the outputs that have them,
        are more than `most` bytes."""
        shelf = self._of_key.get(key) or _Shelf()
        shelf.shrink(self._max_bytes, self._clock())
        found: dict[str, bytes] = {}
        read = size = 0
        for id in ids:
            if id not in found and (response := shelf.of_item.get(id)) is not None:
                output = shelf.responses[response][0].conversation[-1]
                read += len(output)
                if read <= most:
                    found |= {_named(raw).id: bytes(raw) for raw in _parts(output)}
            if max(read, size := size + len(found.get(id, b""))) > most:
                raise BodyTooLarge(f"the stored items of input are larger than {most} bytes", param="input")
            if id not in found:
                text = f"Item with id {id[:80]!r} not found: send the item, or store the response that has it"
                raise NotFound(text, param="input")
        return found

    def delete(self, key: str, id: str) -> None:
        """Raises NotFound."""
        self.get(key, id)
        self._of_key[key].pop(id)


class _Shelf:
    """The responses of one key, the oldest first, each with the time at which it expires, and its size."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, tuple[StoredResponse, float, int]] = OrderedDict()
        self.of_item: dict[str, str] = {}
        """The response of each output item, by their ids."""
        self._bytes = 0

    def put(self, id: str, response: StoredResponse, expires: float) -> None:
        self.responses[id] = response, expires, response.size
        self.of_item |= dict.fromkeys(response.items, id)
        self._bytes += response.size

    def pop(self, id: str) -> None:
        response, _, size = self.responses.pop(id)
        for item in response.items:
            self.of_item.pop(item, None)
        self._bytes -= size

    def shrink(self, max_bytes: int, now: float) -> None:
        while self.responses:
            oldest, (_, expires, _) = next(iter(self.responses.items()))
            if len(self.responses) <= MAX_RESPONSES and self._bytes <= max_bytes and expires > now:
                break
            self.pop(oldest)
