"""The one way from the deltas of a request to its client, over HTTP and gRPC.

A builder makes bytes of the deltas. They leave through an end: `http_writer.EventStream` or
`grpc_server.MessageStream`, which wait until the client has taken them. `ActiveRequest.generating` is open
meanwhile: it admits the generations, and cancels them if the client leaves.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from baton.router.active_request import ActiveRequest
from baton.router.endpoints import http_writer
from baton.router.endpoints.builders.anthropic import AnthropicBuilder
from baton.router.endpoints.builders.completions import ChatBuilder, ChoicesBuilder, CompletionBuilder
from baton.router.endpoints.builders.grpc import MessagesBuilder
from baton.router.endpoints.builders.openai_responses import OpenAIResponsesBuilder
from baton.router.errors import ApiError
from baton.router.generation.output import Delta

log = logging.getLogger(__name__)

ResponseBuilder = ChatBuilder | CompletionBuilder | AnthropicBuilder | OpenAIResponsesBuilder
"""Makes the response to one request. In a stream: `events` of each delta, then `end` or `failed`.
Else: `add` each delta, then `whole`."""


class Stream(Protocol):
    """The way to one client."""

    @property
    def begun(self) -> bool:
        """The status has left: an error becomes the last events."""
        ...

    @property
    def silent(self) -> bool:
        """The client has got nothing for so long that it should see that the stream is alive."""
        ...

    async def write(self, events: bytes) -> None:
        """Waits until the client makes room for all of them. Raises TooSlow or ConnectionError if it does not
        in time. Without events: shows that the stream is alive."""
        ...

    async def end(self, events: bytes, end: bytes) -> None:
        """Writes the last events, and what follows them, and ends the stream."""
        ...

    def write_now(self, events: bytes, now: float) -> bool:
        """Writes events, if there are some. False: nothing is written, and the task has to `write`. `now`: by
        the clock of the loop."""
        ...


async def stream(active: ActiveRequest, builder: ResponseBuilder | MessagesBuilder, to: Stream) -> None:
    """Writes the deltas as they come, to the end. Raises ApiError if the stream has not begun."""
    new: list[bytes] = []  # events that are not written yet

    def flush(now: float) -> bool:
        if active.over or not to.write_now(b"".join(new), now):
            return False
        new.clear()
        return True

    try:
        while not active.finished:
            deltas = await _deltas(active, builder)
            new += [builder.events(index, delta) for index, delta in deltas]
            if active.finished:
                break
            events, came = b"".join(new), bool(new)
            new.clear()
            if events or not came or to.silent:
                begins = not to.begun
                await to.write(events)
                if begins and to.begun:
                    active.consume(builder.events, new, flush)
        end = builder.end()
    except ApiError as error:
        if not to.begun:
            raise
        active.services.metrics.failed(error, active.entry.name)
        end = builder.failed(error)
    await to.end(b"".join(new), end)


def defect(name: str) -> ApiError:
    """Returns the error for an exception that is being handled: a bug in the router. The log has its stack,
    and the client gets the id of the request."""
    log.exception("request %s", name)
    return ApiError(f"request {name} failed inside the router")


async def collect(
    active: ActiveRequest, builder: ResponseBuilder, add: Callable[[int, Delta], None] | None = None
) -> None:
    """Gives all deltas to `add`, by default that of the builder. Raises ApiError."""
    use = add or builder.add
    active.consume(use, deque(maxlen=0), lambda now: not active.over)
    while not active.finished:
        for index, delta in await _deltas(active, builder):
            use(index, delta)


async def _deltas(
    active: ActiveRequest, builder: ResponseBuilder | MessagesBuilder
) -> list[tuple[int, Delta]]:
    """Takes deltas. The builder has what comes before them: log probabilities of their prompts."""
    deltas = await active.take(http_writer.KEEPALIVE_SECONDS)
    for index, delta in deltas:
        for part in delta.prompt:
            assert isinstance(builder, ChoicesBuilder), "the other APIs show none"
            builder.add_prompt(index, part)
            await asyncio.sleep(0)  # other tasks run between the parts of a long prompt
    return deltas
