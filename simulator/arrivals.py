"""The requests that arrive in the simulator of placement: at random times, or as turns of chats."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        at: seconds from the start.
        prompt, answer: tokens.
        session: number of the first request of its chat.
        chunks: hints of the prompt and the answer, in chunks of 64 tokens. Workers cache these chunks.
        before: number of the request whose answer it continues. It comes after that. None: it begins a chat.
    """

    at: float
    prompt: int
    answer: int
    session: int
    chunks: Sequence[int] = ()
    before: int | None = None


def arrivals(
    load: Callable[[float], Load], requests: int, workers: int, rng: random.Random
) -> Iterator[Arrival]:
    """Requests that arrive at random times. `load`: what arrives at a time."""
    at = 0.0
    for number in range(requests):
        at += rng.expovariate(load(at).rate * workers / 2)
        found = load(at)
        yield Arrival(at, found.prompt, found.answer, number)
