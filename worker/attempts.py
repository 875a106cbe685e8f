"""Which router owns which attempt in the engine process, and what goes back to it.

An attempt is in the table from its submission to its one end. What the engine still yields for an attempt
that was cancelled in between finds no owner and goes nowhere.
"""

from collections import defaultdict
from collections.abc import Callable

from engine import Output
from worker import messages
from worker.messages import Code, FromEngine


class Attempts:
    """`send` takes messages for the service process. Tokens are gathered until `flush`, once per engine
    step."""

    def __init__(self, send: Callable[[FromEngine], None]) -> None:
        self._send = send
        self._streams: dict[bytes, int] = {}  # attempt id -> stream that owns it
        self._tokens: defaultdict[int, list[Output]] = defaultdict(list)  # by stream

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, stream: int, attempt_id: bytes) -> None:
        assert attempt_id not in self._streams, "ids are checked by the role, which knows them for longer"
        self._streams[attempt_id] = stream

    def refuse_reused(self, stream: int, attempt_id: bytes) -> None:
        """For a submission under an id that is in use; what uses it goes on."""
        self._fail(stream, attempt_id, Code.INVALID, "this id is in use")

    def owned(self, stream: int, attempt_id: bytes) -> bool:
        """Only the router that submitted an attempt may change it."""
        return self._streams.get(attempt_id) == stream

    def of(self, stream: int) -> list[bytes]:
        return [attempt_id for attempt_id, owner in self._streams.items() if owner == stream]

    def end(self, attempt_id: bytes) -> None:
        """It ended without a word to its router (which ended it, or knows from the last token)."""
        self._streams.pop(attempt_id, None)

    def fail(self, attempt_id: bytes, code: Code, message: str) -> None:
        """Ends it and tells its router why."""
        stream = self._streams.pop(attempt_id, None)
        if stream is not None:
            self._fail(stream, attempt_id, code, message)

    def fail_all(self, code: Code, message: str) -> None:
        for attempt_id in list(self._streams):
            self.fail(attempt_id, code, message)

    def kv_failed(self, attempt_id: bytes, prefill_id: bytes, message: str) -> None:
        """Tells its router; the attempt goes on, and with it the reservation."""
        stream = self._streams.get(attempt_id)
        if stream is not None:
            self._send(messages.Failed(stream, attempt_id, Code.KV_FAILED, message, prefill_id))

    def reserved(self, attempt_id: bytes) -> None:
        self._send(messages.Reserved(self._streams[attempt_id], attempt_id))

    def token(self, output: Output) -> None:
        stream = self._streams.get(output.id)
        if stream is None:
            return
        self._tokens[stream].append(output)

    def flush(self) -> None:
        """One message per router with all tokens since the last flush."""
        for stream, tokens in self._tokens.items():
            self._send(messages.Tokens(stream, tokens))
        self._tokens.clear()

    def _fail(self, stream: int, attempt_id: bytes, code: Code, message: str) -> None:
        self.flush()  # what was sampled before travels before
        self._send(messages.Failed(stream, attempt_id, code, message))
