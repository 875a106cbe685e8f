"""What clients ask: sessions of turns, or requests at random times.

A prompt is its length and the hashes of its 64-token chunks.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        tokens: of the prompt.
        chunks: a hash for each full chunk of the prompt, and of the answer if it has more than one token. Two
            prompts with an equal hash share all tokens up to the end of that chunk.
        think: seconds from the last token of this turn to the next turn.
        answer: tokens. One token needs no decode worker.
    """

    tokens: int
    chunks: tuple[int, ...]
    think: float
    answer: int = 1


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


SPREAD = 0x9E3779B97F4A7C15
"""Multiples of this are far apart, modulo 2⁶⁴."""


def arrivals(
    load: Callable[[float], Load], requests: int, workers: int, rng: random.Random
) -> Iterator[tuple[float, Session]]:
    """The random times at which requests arrive, each with the load of that time. Each is a session of its
    own, and no worker has its prompt cached."""
    at = 0.0
    for number in range(requests):
        at += rng.expovariate(load(at).rate * workers / 2)
        lengths = load(at)
        yield at, Session(number * SPREAD % 2**64, (Turn(lengths.prompt, (), 0.0, lengths.answer),), 0)
