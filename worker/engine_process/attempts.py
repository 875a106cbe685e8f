"""The table of attempts in the engine process, and the messages about them that go back to routers.

An attempt is in the table from its submission until no transfer uses its blocks. It may end for its router
before that, for example with a cancel. From then on no message names it.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from baton.engine import Logprobs, Output, PromptLogprobs
from baton.engine.core.live_request import LiveRequest
from baton.kv_transfer import FirstToken
from baton.worker import messages
from baton.worker.messages import Code, FromEngine, Origin


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """What the worker knows of an attempt. Each role adds its fields."""

    stream: int | None
    """Of the router that submitted it. None: it has ended for this router."""
    origin: Origin
    tokens: int
    """Of the prompt, and of the output before this attempt."""
    fetched: int = 0
    """Those with KV that came from another worker's prefix cache for this attempt."""
    live: LiveRequest | None = None
    """Its request in the engine. None: it has not come there."""
    closed: bool = False
    """Ended. Its blocks come back when no transfer uses them."""

    @property
    def id(self) -> bytes:
        return self.origin.attempt_id


A = TypeVar("A", bound=Attempt)


class Attempts:
    """The attempts of all roles. `send` takes messages for the service process.

    Tokens are collected until `flush_tokens`, which the loop calls once per engine step.
    """

    def __init__(self, send: Callable[[FromEngine], None]) -> None:
        self._send = send
        self._tables: dict[type[Attempt], dict[bytes, Any]] = {}
        self._tokens: defaultdict[int, list[Output]] = defaultdict(list)  # by stream
        self._reports: list[FromEngine] = []  # since the last flush

    def table(self, kind: type[A]) -> dict[bytes, A]:
        """The attempts of a role by id, in order of arrival. An id is in one of the tables."""
        return self._tables.setdefault(kind, {})

    def __len__(self) -> int:
        return sum(map(len, self._tables.values()))

    def __iter__(self) -> Iterator[Attempt]:
        return chain.from_iterable(table.values() for table in self._tables.values())

    def find(self, attempt_id: bytes) -> Attempt | None:
        return next((table[attempt_id] for table in self._tables.values() if attempt_id in table), None)

    def open(self, attempt: Attempt) -> bool:
        """Adds a new attempt.

        If the id is in use, returns False and tells the router. The attempt that uses the id goes on.
        """
        if self.find(attempt.id) is not None:
            self.fail(attempt, Code.INVALID, "this id is in use")
            return False
        self.table(type(attempt))[attempt.id] = attempt
        return True

    def cancelled(self, attempt: Attempt) -> None:
        """The router needs it no more."""
        self.report(messages.Cancelled(attempt.origin))
        attempt.stream = None

    def fail(self, attempt: Attempt, code: Code, message: str, prefill_id: bytes = b"") -> None:
        """Tells the router why, once. Only with KV_FAILED the attempt goes on; `prefill_id` should have sent
        the KV."""
        if attempt.stream is None:
            return
        self.flush()  # the router must get earlier tokens before the failure
        self._send(messages.AttemptFailed(attempt.stream, attempt.origin, code, message, prefill_id))
        if code is not Code.KV_FAILED:
            attempt.stream = None

    def fail_all(self, code: Code, message: str) -> None:
        for attempt in self:
            self.fail(attempt, code, message)

    def reserved(self, attempt: Attempt) -> None:
        if attempt.stream is not None:
            self._send(messages.Reserved(attempt.stream, attempt.id))

    def prefill_started(self, attempt: Attempt) -> None:
        if attempt.stream is not None:
            self._send(messages.PrefillStarted(attempt.stream, attempt.id))

    def scored(self, logprobs: PromptLogprobs) -> None:
        attempt = self.find(logprobs.id)
        if attempt is not None and attempt.stream is not None:
            self._send(messages.PromptScored(attempt.stream, logprobs))

    def token(self, attempt: Attempt, output: Output) -> None:
        if attempt.stream is not None:
            self._tokens[attempt.stream].append(output)

    def prefilled(self, attempt: Attempt, output: Output) -> None:
        """The step has computed the prompt of the attempt."""
        now = time.monotonic()
        began = now - output.prefill_seconds
        done = messages.Prefilled(
            attempt.origin,
            queued_at=began - output.queue_seconds,
            began_at=began,
            token_at=now,
            prompt_tokens=attempt.tokens,
            cached_tokens=output.cached_tokens,
        )
        self.report(done)

    def report(self, message: messages.Report) -> None:
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


def handed_over(output: Output) -> FirstToken:
    """What a decode worker gets of the first token, beside the KV."""
    if (logprobs := output.logprobs) is None:
        return FirstToken(output.token)
    return FirstToken(output.token, logprobs.logprob, logprobs.top_ids, logprobs.top_logprobs)


def logprobs_of(first: FirstToken) -> Logprobs | None:
    """None: they were not asked for."""
    if first.logprob is None:
        return None
    return Logprobs(first.logprob, first.top_ids, first.top_logprobs)
