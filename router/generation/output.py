"""The output of one generation: from the tokens of its workers to the text of its client.

1. The generation makes a `Delta` of each token, and puts it into the `TokenQueue` of the request.
2. The task that answers the client takes them, or its consumer gets them at once while it waits for them. A
   `Choice` adds the text, which ends at stop strings.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from baton.router.api.bodies import Options
from baton.router.errors import ApiError
from baton.router.text.detokenizer import Detokenizer, StopFinder, StopStrings
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import worker_pb2 as pb

MAX_TAKEN = 128
"""Items that `take` returns at once. Writing them blocks the event loop for some milliseconds."""


class Delta(msgspec.Struct):  # a dataclass takes three times as long to make
    """What one token adds to its choice. `Choice.push` adds what is below `prompt`."""

    token_id: int
    logprobs: pb.TokenLogprobs | None = None
    finish_reason: str | None = None
    """Of the last one "stop" or "length"."""
    prompt: Sequence[pb.PromptLogprobs] = ()
    """Of the first token: the log probabilities of all tokens of the prompt but the first, if asked for."""
    text: str = ""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the choice; None for EOS."""
    first: bool = False
    """This is the first delta of its choice."""

    @property
    def stops(self) -> dict[str, str | int | None]:
        """What ended the choice, as vLLM names it, and as SGLang does, which includes EOS."""
        if self.finish_reason is None:
            return {}
        eos = self.token_id if self.finish_reason == "stop" else None
        return {
            "stop_reason": self.stop_reason,
            "matched_stop": eos if self.stop_reason is None else self.stop_reason,
        }


Item = tuple[int, Delta | ApiError]
"""What a generation puts into the queue of its request, with its number there."""


class Consumers:
    """The queues whose consumers have added items, and flush them in the next turn of the event loop, all in
    one callback. A callback for each would take a tenth of what a token costs."""

    def __init__(self) -> None:
        self._queues: list[TokenQueue] = []

    def add(self, queue: "TokenQueue") -> None:
        if not self._queues:
            asyncio.get_running_loop().call_soon(self._flush)
        self._queues.append(queue)

    def _flush(self) -> None:
        queues, self._queues = self._queues, []
        now = asyncio.get_running_loop().time()
        for queue in queues:
            queue.flush(now)


class TokenQueue:
    """The tokens of a request that its client has not read yet.

    Generations put tokens without waiting. The task that answers the client takes them. While it waits for
    them, its consumer adds each at once to what goes to the client, and flushes that once for all tokens that
    came at the same time: to wake a task for each token would take as long as all else that is done for it.

    The queue is bounded, so that a client that reads slowly does not delay other requests. `on_full` is
    called soon after more than `limit` items are unread.
    """

    def __init__(self, limit: int, on_full: Callable[[], None], consumers: Consumers) -> None:
        self._limit = limit
        self._on_full = on_full
        self._consumers = consumers
        self._items: deque[Item] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._consumer: Callable[[int, Delta | ApiError], None] | None = None
        self._add: Callable[[int, Delta | ApiError], None] | None = None  # the consumer while items go there
        self._added = 0  # since the last flush
        self._consumed_at = 0.0  # by the clock of the loop

    def consume(self, add: Callable[[int, Delta | ApiError], None], flush: Callable[[float], bool]) -> None:
        """Sets the consumer. `flush` gets the time of the loop, and returns False if the task must go on."""
        self._consumer, self._flush = add, flush

    def close(self) -> None:
        """Nothing is consumed any more. Drops what refers to the request."""
        self._consumer = self._add = None
        self._flush, self._on_full = lambda now: False, lambda: None

    def put(self, index: int, item: Delta | ApiError) -> None:
        """`index` is the number of the generation in its request."""
        add = self._add
        if add is None:
            self._items.append((index, item))
            if len(self._items) == self._limit + 1:
                asyncio.get_running_loop().call_soon(self._on_full)
            if not self._added:
                self._wake()
            return
        if not self._added:
            self._consumers.add(self)
        self._added += 1
        if self._added == MAX_TAKEN:
            self._add = None  # what else comes in this turn of the loop waits for the next one
        try:
            add(index, item)
        except Exception as error:  # noqa: BLE001 - the task raises it
            self._wake(error)

    async def take(self, timeout: float) -> list[Item]:
        """Waits for the first item. Returns at most `MAX_TAKEN`.

        None if no item came for `timeout` seconds, or if the last ones were consumed."""
        if len(self._items) > MAX_TAKEN:
            await asyncio.sleep(0)  # other tasks run between the pieces of a long queue
        if not self._items:
            loop = asyncio.get_running_loop()
            self._reader, self._consumed_at = loop.create_future(), loop.time()
            self._timer = loop.call_later(timeout, self._expire, timeout)
            self._add = self._consumer
            try:
                await self._reader
            finally:
                self._timer.cancel()
                self._reader = self._add = None
        return self.pop()

    def pop(self) -> list[Item]:
        """Returns the first `MAX_TAKEN` items."""
        items = self._items
        return [items.popleft() for _ in range(min(len(items), MAX_TAKEN))]

    def _expire(self, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        seconds = self._consumed_at + timeout - loop.time()
        if seconds > 0:
            self._timer = loop.call_later(seconds, self._expire, timeout)
        else:
            self._wake()

    def _wake(self, error: Exception | None = None) -> None:
        self._add = None
        if self._reader is None or self._reader.done():
            return
        if error is None:
            self._reader.set_result(None)
        else:
            self._reader.set_exception(error)

    def flush(self, now: float) -> None:
        """Flushes what was consumed since the last turn of the event loop. `now`: its time."""
        self._added = 0
        if self._reader is None or self._reader.done():
            return  # the task goes on with it
        self._consumed_at = now
        try:
            goes_on = self._flush(now)
        except Exception as error:  # noqa: BLE001 - the task raises it
            self._wake(error)
            return
        if not goes_on:
            self._wake()
        elif self._add is None:
            items, self._add = self.pop(), self._consumer
            for index, item in items:  # the last of `MAX_TAKEN` leaves the others to the next turn
                self.put(index, item)


class Choice:
    """The text of one generation: one of the alternative texts of an OpenAI answer.

    Does not keep deltas, because a stream may be long.

    Attributes:
        num_tokens: tokens so far, including the last one.
        finish_reason: None until the last delta.
    """

    def __init__(self, tokenizer: ModelTokenizer, options: Options, stops: StopStrings) -> None:
        """`stops`: those of the options."""
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=options.skip_special_tokens)
        self._include_stop = options.include_stop_str_in_output
        self._has_stops = bool(stops.texts)
        self._stops = StopFinder(stops, include=self._include_stop)
        self._stop_token_ids = frozenset(options.stop_token_ids or ())
        self._min_tokens = options.min_tokens
        self._generates = options.max_tokens_wanted != 0  # else the only token adds nothing

    def push(self, delta: Delta) -> None:
        """Adds the text of the next token to its delta. The last delta has a finish reason.

        A stop string ends the choice although the model would generate more tokens.
        """
        if not self._generates:
            self.finish_reason = delta.finish_reason = "length"
            delta.first = True
            return
        reason = delta.finish_reason
        stopped = reason == "stop" and not self._include_stop
        text = "" if stopped else self._detokenizer.push(delta.token_id)
        if reason:
            text += self._detokenizer.finish()
        if self._has_stops:
            text, delta.stop_reason = self._stops.push(text, may_stop=self.num_tokens >= self._min_tokens)
        if delta.stop_reason is not None:
            reason = delta.finish_reason = "stop"
        elif reason:
            text += self._stops.finish()
            if reason == "stop" and delta.token_id in self._stop_token_ids:
                delta.stop_reason = delta.token_id
        delta.text = text
        if not self.num_tokens:
            delta.first = True
        self.num_tokens += 1
        self.finish_reason = reason
