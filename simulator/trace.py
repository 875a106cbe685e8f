"""What clients ask: sessions of turns, or requests at random times.

A prompt is its length and the hashes of its 64-token chunks.
"""

import random
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from baton.content import CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        chunks: a hash for each full chunk of the prompt. Two prompts with an equal hash share all tokens up
            to the end of that chunk.
        think: from the first token of this turn to the next turn, in units of `Setting.think`.
    """

    tokens: int
    chunks: tuple[int, ...]
    think: float


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow each other.

    Attributes:
        key: what a router tells sessions apart by.
        shared_chunks: chunks at the beginning that other sessions have, too.
    """

    key: int
    turns: tuple[Turn, ...]
    shared_chunks: int


Trace = Sequence[Session]


def hit_tokens(turn: Turn, cached: Container[int]) -> int:
    """The prompt tokens that a cache with these chunks saves. The last position is always computed."""
    chunks = sum(1 for _ in takewhile(lambda chunk: chunk in cached, turn.chunks))
    return min(chunks * CHUNK_TOKENS, turn.tokens - 1)


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives.

    Attributes:
        prompt, answer: tokens of each request.
        rate: requests per second for each two workers. Four workers get twice as many.
    """

    prompt: int
    answer: int
    rate: float


def arrivals(
    load: Callable[[float], Load], requests: int, workers: int, rng: random.Random
) -> Iterator[tuple[float, Load]]:
    """The random times at which requests arrive, each with the load of that time."""
    at = 0.0
    for _ in range(requests):
        at += rng.expovariate(load(at).rate * workers / 2)
        yield at, load(at)
