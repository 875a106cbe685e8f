"""What every builder of responses does."""

from typing import Any

import msgspec

from baton.router.errors import ApiError
from baton.router.generation.choice import Delta
from baton.rpc import worker_pb2 as pb

encode = msgspec.json.Encoder().encode


class ResponseBuilder:
    """Builds the response to one request. It is either whole or a stream of server-sent events."""

    def add_prompt(self, index: int, part: pb.PromptLogprobs) -> None:
        """Adds log probabilities of the next tokens of the prompt, before the first delta of the choice."""
        raise NotImplementedError

    def add(self, index: int, delta: Delta) -> None:
        """Adds the next delta of the choice `index` to the whole response."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """Returns the whole response. Every choice must have its last delta."""
        raise NotImplementedError

    def events(self, index: int, delta: Delta) -> bytes:
        """Returns the events of the next delta of the choice `index`."""
        raise NotImplementedError

    def end(self) -> bytes:
        """Returns the events at the end of a stream."""
        raise NotImplementedError

    def failed(self, error: ApiError) -> bytes:
        """Returns the events at the end of a stream that fails."""
        raise NotImplementedError


def event(payload: Any) -> bytes:
    """Returns a server-sent event without a name."""
    return b"data: " + encode(payload) + b"\n\n"
