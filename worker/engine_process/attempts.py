"""The table of attempts in the engine process: which router owns each, and the messages that go back.

An attempt is in the table from its submission to its end. Tokens of an attempt that is no longer in the table
are dropped, for example after a cancel.
"""

from collections import defaultdict
from collections.abc import Callable

from baton.engine import Output, PromptLogprobs
from baton.worker import messages
from baton.worker.messages import Code, FromEngine


class Attempts:
    """Owners of attempts. `send` takes messages for the service process.

    Tokens are collected until `flush_tokens`, which the loop calls once per engine step.
    """

    def __init__(self, send: Callable[[FromEngine], None]) -> None:
        self._send = send
        self._streams: dict[bytes, int] = {}  # attempt id -> stream that owns it
        self._tokens: defaultdict[int, list[Output]] = defaultdict(list)  # by stream
        self._reports: list[FromEngine] = []  # since the last flush

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, attempt_id: bytes) -> bool:
        return attempt_id in self._streams

    def open(self, stream: int, attempt_id: bytes) -> None:
        assert attempt_id not in self._streams, "the role refuses ids that are in use"
        self._streams[attempt_id] = stream

    def refuse_reused(self, stream: int, attempt_id: bytes) -> None:
        """Refuses a submission with an id that is in use. The attempt that uses the id goes on."""
        self._fail(stream, attempt_id, Code.INVALID, "this id is in use")

    def owned(self, stream: int, attempt_id: bytes) -> bool:
        """Returns whether the router of `stream` submitted the attempt. Only that router may change it."""
        return self._streams.get(attempt_id) == stream

    def of(self, stream: int) -> list[bytes]:
        return [attempt_id for attempt_id, owner in self._streams.items() if owner == stream]

    def end(self, attempt_id: bytes) -> None:
        """Removes the attempt without a message: its router cancelled it, or got its last token."""
        self._streams.pop(attempt_id, None)

    def fail(self, attempt_id: bytes, code: Code, message: str) -> None:
        """Removes the attempt and tells its router why. Does nothing if the attempt is not in the table."""
        stream = self._streams.pop(attempt_id, None)
        if stream is not None:
            self._fail(stream, attempt_id, code, message)

    def fail_all(self, code: Code, message: str) -> None:
        for attempt_id in list(self._streams):
            self.fail(attempt_id, code, message)

    def kv_failed(self, attempt_id: bytes, prefill_id: bytes, message: str) -> None:
        """Tells the router that the KV did not arrive. The attempt and its reservation stay."""
        stream = self._streams.get(attempt_id)
        if stream is not None:
            self._send(messages.AttemptFailed(stream, attempt_id, Code.KV_FAILED, message, prefill_id))

    def reserved(self, attempt_id: bytes) -> None:
        self._send(messages.Reserved(self._streams[attempt_id], attempt_id))

    def prefill_started(self, attempt_id: bytes) -> None:
        stream = self._streams.get(attempt_id)
        if stream is not None:
            self._send(messages.PrefillStarted(stream, attempt_id))

    def scored(self, logprobs: PromptLogprobs) -> None:
        stream = self._streams.get(logprobs.id)
        if stream is not None:
            self._send(messages.PromptScored(stream, logprobs))

    def token(self, output: Output) -> None:
        stream = self._streams.get(output.id)
        if stream is None:
            return
        self._tokens[stream].append(output)

    def report(
        self, message: messages.KVInjected | messages.Prefilled | messages.SecondToken | messages.Decoded
    ) -> None:
        """Sends what metrics and logs say of an attempt, when no client waits for this thread."""
        self._reports.append(message)

    def flush_tokens(self) -> None:
        """Sends each router one message with all its tokens since the last flush."""
        for stream, tokens in self._tokens.items():
            self._send(messages.Tokens(stream, tokens))
        self._tokens.clear()

    def flush(self) -> None:
        """Sends tokens, then reports."""
        self.flush_tokens()
        for report in self._reports:
            self._send(report)
        self._reports.clear()

    def _fail(self, stream: int, attempt_id: bytes, code: Code, message: str) -> None:
        self.flush()  # the router must get earlier tokens before the failure
        self._send(messages.AttemptFailed(stream, attempt_id, code, message))
