"""A trace of chats (`multi_turn`), and a cluster that suits it (`size`).

Chunk hashes are made up: two are equal where the prompts are equal up to there. A session has one of 8 system
prompts of 512 tokens (popularity ∝ 1/rank) and a geometric number of turns (mean 6, at most 24). User
messages and answers have log-normal lengths (median 120 and 200 tokens, σ 0.8, at most 2,000). Each prompt
holds the whole history. Clients send a session id.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import xxhash

from baton.kv_names import CHUNK_TOKENS
from baton.simulator.steps import H200_8B, Machine, step_seconds
from baton.simulator.trace import Session, Trace, Turn

SYSTEM_PROMPTS, SYSTEM_TOKENS = 8, 512
MEAN_TURNS, MOST_TURNS = 6.0, 24
USER_TOKENS, ANSWER_TOKENS, SIGMA, MOST_TOKENS = 120, 200, 0.8, 2_000
LOAD = 0.8
"""Of what the workers could compute if no prompt were cached. Below 1, every policy keeps up."""
FULL = 0.9
"""Share of the caches that live sessions fill, if each is on one worker only and all workers hold what
sessions share. A session is live from one turn to the next."""


def multi_turn(requests: int, seed: int) -> Trace:
    rng = random.Random(seed)
    return list(_until(requests, (_chat(rng, i) for i in itertools.count())))


def _chat(rng: random.Random, number: int) -> Session:
    [system] = rng.choices(range(SYSTEM_PROMPTS), [1 / (i + 1) for i in range(SYSTEM_PROMPTS)])
    shared = SYSTEM_TOKENS // CHUNK_TOKENS
    history, turns = SYSTEM_TOKENS, []
    while True:
        history += _length(rng, USER_TOKENS)
        chunks = history // CHUNK_TOKENS
        names = [_name("system", system, i) for i in range(shared)]
        names += [_name("chat", number, i) for i in range(shared, chunks)]
        turns.append(Turn(history, tuple(names), rng.expovariate(1)))
        history += _length(rng, ANSWER_TOKENS)
        if len(turns) == MOST_TURNS or rng.random() < 1 / MEAN_TURNS:
            return Session(_name("session", number, 0), tuple(turns), shared)


def h200(uncached: int, cached: int) -> float:
    """Seconds for one prompt of Llama-3.1-8B in bfloat16 on one H200."""
    return step_seconds(0, 0, [(uncached, cached)])


class Sized(NamedTuple):
    """Sessions with the times at which they begin, and the workers that they meet."""

    sessions: list[tuple[float, Session]]
    machine: Machine


def size(trace: Trace, *, workers: int, sessions: float, seed: int = 1) -> Sized:
    """Chooses session rate and cache capacity, so that a trace means the same for any number of workers.

    `sessions`: how many, per worker, are between two turns. The think time follows from it."""
    seconds = sum(h200(turn.tokens, 0) for session in trace for turn in session.turns)
    rate = LOAD * workers * len(trace) / seconds
    pauses = sum(turn.think for session in trace for turn in session.turns[:-1])
    think = sessions * workers * len(trace) / (rate * pauses) if pauses else 0.0
    longest = max(len(turn.chunks) for session in trace for turn in session.turns)
    capacity = max(longest + 2, round(_live_chunks(trace, rate, think, workers) / FULL))
    rng, at, timed = random.Random(seed), 0.0, list[tuple[float, Session]]()
    for session in trace:
        at += rng.expovariate(rate)
        turns = tuple(replace(turn, think=turn.think * think) for turn in session.turns)
        timed.append((at, replace(session, turns=turns)))
    return Sized(timed, replace(H200_8B, positions=-(-capacity // 2) * 2 * CHUNK_TOKENS))


def _live_chunks(trace: Trace, rate: float, think: float, workers: int) -> float:
    """Per worker."""
    shared = {chunk for s in trace for chunk in s.turns[0].chunks[: s.shared_chunks]}
    private = sum(
        (len(turn.chunks) - session.shared_chunks) * turn.think * think
        for session in trace
        for turn in session.turns[:-1]
    )
    return private * rate / len(trace) / workers + len(shared)


def _until(requests: int, sessions: Iterator[Session]) -> Iterator[Session]:
    for session in sessions:
        yield session
        requests -= len(session.turns)
        if requests <= 0:
            return


def _length(rng: random.Random, median: int) -> int:
    return min(MOST_TOKENS, max(1, round(median * rng.lognormvariate(0, SIGMA))))


def _name(kind: str, number: int, index: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{kind} {number} {index}".encode())
