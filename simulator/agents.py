"""The load of agents: sessions of many turns, whose prompts hold all that was said before.

All sessions share a prefix, and each has a context of its own. It is the load of `baton bench agents`.
"""

import numpy as np
import xxhash

from baton.kv_names import CHUNK_TOKENS
from baton.simulator.trace import Session, Turn

PREFIX, CONTEXT = 4_000, 6_000
"""Tokens before the first turn: those of all sessions, and those of one."""
NEW = (876, 0.8, 50, 8_000)
"""Tokens that a turn adds: median and sigma of a lognormal distribution, and the bounds of a draw."""
ANSWER = (60, 240)
"""Least and most tokens of an answer, all as likely."""
THOUGHT = 1.5
"""Mean seconds between two turns, exponential."""
TURNS = 10
"""Of a session."""


def agents(sessions: int, turns: int = TURNS, seed: int = 1) -> list[tuple[float, Session]]:
    """Returns twice as many sessions as run at a time, with so many turns each."""
    rng = np.random.default_rng(seed)
    return [(0.0, agent(rng, number, turns)) for number in range(2 * sessions)]


def agent(rng: np.random.Generator, number: int, turns: int) -> Session:
    median, sigma, least, most = NEW
    tokens, rounds = PREFIX + CONTEXT, list[Turn]()
    for _ in range(turns):
        tokens_drawn = float(median * np.exp(rng.normal(0.0, sigma)))
        tokens += max(1, round(min(most, max(least, tokens_drawn))))
        answer = int(rng.integers(ANSWER[0], ANSWER[1] + 1))
        chunks = tuple(
            chunk_name("agents" if (i + 1) * CHUNK_TOKENS <= PREFIX else f"agent {number}", i)
            for i in range((tokens + answer) // CHUNK_TOKENS)
        )
        rounds.append(Turn(tokens, chunks, float(rng.exponential(THOUGHT)), answer))
        tokens += answer
    return Session(chunk_name("agent", number), tuple(rounds), PREFIX // CHUNK_TOKENS)


def chunk_name(kind: str, index: int) -> int:
    """A hash for a chunk, or for the key of a session."""
    return xxhash.xxh3_64_intdigest(f"{kind} {index}".encode())
