"""The plan of one step. Pure; knows no tensor."""

from dataclasses import dataclass, field
from typing import NamedTuple

from baton.engine.core.live_request import LiveRequest


class Chunk(NamedTuple):
    """Positions [start, stop) of one request, computed in one step."""

    live: LiveRequest
    start: int
    stop: int
    decodes: bool = False
    """Whether the request generates. False: a part of its prompt, or of what was lost, is computed."""

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class Schedule:
    """The plan of one step, and the requests that it admitted or preempted."""

    chunks: list[Chunk] = field(default_factory=list)
    """Decodes before prefills."""
    started: list[LiveRequest] = field(default_factory=list)
    """Requests that this step admitted from the queue."""
    handed_back: list[LiveRequest] = field(default_factory=list)
    """Preempted requests that go back to their sender. Their blocks are free already."""
    recomputed: list[LiveRequest] = field(default_factory=list)
    """Preempted requests that went back to the queue, to be prefilled again."""
    decodes: bool = False
    """Whether some request gets a token after its first one."""

    @property
    def prompt_tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks if not chunk.decodes)
