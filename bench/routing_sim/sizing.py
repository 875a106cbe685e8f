"""Chooses session rate and cache capacity, so that a trace means the same for any number of workers."""

from __future__ import annotations

from baton.simulator.prefill import Setting
from baton.simulator.trace import Trace

LOAD = 0.8
"""Of what the workers could compute if no prompt were cached. Below 1, every policy keeps up."""
FULL = 0.9
"""Share of the caches that live sessions fill, if each is on one worker only and all workers hold what
sessions share. A session is live from one turn to the next."""


def h200(uncached: int, cached: int) -> float:
    """Seconds for one prompt of Llama-3.1-8B in bfloat16 on one H200.

    Fitted to measurements: 49.8 ms for 2,000 tokens, 210 ms for 8,000. A token takes 22.6 µs of matrix
    products, a pair of positions 1.15 ns of attention. To read the weights takes 4.1 ms.
    """
    pairs = uncached * (cached + uncached / 2)
    return max(4.1e-3, 22.6e-6 * uncached) + 1.15e-9 * pairs


def size(trace: Trace, *, workers: int, routers: int, sessions: float) -> Setting:
    """`sessions`: how many, per worker, are between two turns. The think time follows from it."""
    seconds = sum(h200(turn.tokens, 0) for session in trace.sessions for turn in session.turns)
    rate = LOAD * workers * len(trace.sessions) / seconds
    pauses = sum(turn.think for session in trace.sessions for turn in session.turns[:-1])
    think = sessions * workers * len(trace.sessions) / (rate * pauses) if pauses else 0.0
    longest = max(len(turn.chunks) for session in trace.sessions for turn in session.turns)
    capacity = max(longest, round(_live_chunks(trace, rate, think, workers) / FULL))
    return Setting(workers, routers, capacity, rate, think, h200)


def _live_chunks(trace: Trace, rate: float, think: float, workers: int) -> float:
    """Per worker. In a trace without later turns only the chunks that sessions share count."""
    shared = {chunk for s in trace.sessions for chunk in s.turns[0].chunks[: s.shared_chunks]}
    if not think:
        return len(shared) / workers
    own = sum(
        (len(turn.chunks) - session.shared_chunks) * turn.think * think
        for session in trace.sessions
        for turn in session.turns[:-1]
    )
    return own * rate / len(trace.sessions) / workers + len(shared)
