"""The plan of one step. Pure; knows no tensor.

    launched ──▶ sampled ──▶ over (the device has computed all of it) ──▶ landed: its tokens are known

A step is sampled right after its launch. A grammar that must know the token before delays this until the step
before has landed; the device computes the forward pass meanwhile.
"""

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
    ids: frozenset[bytes] = frozenset()
    """The requests that it computes. This and the rest is known from the launch on."""
    sampled: list[LiveRequest] = field(default_factory=list)
    """The requests that get a token, by row."""
    scored: list[Chunk] = field(default_factory=list)
    """The positions that predict a token of a prompt with log probabilities."""
    refused: dict[int, str] = field(default_factory=dict)
    """By row, what is wrong with a request's grammar."""

    @property
    def prompt_tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks if not chunk.decodes)

    @property
    def waits(self) -> bool:
        """A grammar must know a token of the step before."""
        return any(
            live.grammar is not None and live.grammar.needs_tokens and live.pending for live in self.sampled
        )
