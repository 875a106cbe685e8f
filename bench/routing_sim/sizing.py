"""How fast sessions come and how much caches hold, so that a trace means the same at any size of cluster."""

from __future__ import annotations

from bench.routing_sim.cluster import Setting
from bench.routing_sim.trace import Trace
from bench.routing_sim.worker import Speed


def size(
    trace: Trace, *, workers: int, routers: int, load: float, full: float, sessions: float, speed: Speed
) -> Setting:
    """
    Args:
        load: of the workers, were nothing ever cached: below 1 every policy keeps up.
        full: the share of the caches that live sessions would fill, were each on one worker only and what
        sessions
            share on all. Live: from a turn to the next.
        sessions: that are between two turns, per worker. Decides the think time.
    """
    seconds = sum(speed(turn.tokens, 0) for session in trace.sessions for turn in session.turns)
    rate = load * workers * len(trace.sessions) / seconds
    pauses = sum(turn.think for session in trace.sessions for turn in session.turns[:-1])
    think = sessions * workers * len(trace.sessions) / (rate * pauses) if pauses else 0.0
    return Setting(
        workers=workers,
        routers=routers,
        capacity=max(_longest(trace), round(_live_chunks(trace, rate, think, workers) / full)),
        rate=rate,
        think=think,
        speed=speed,
    )


def _live_chunks(trace: Trace, rate: float, think: float, workers: int) -> float:
    """Per worker. Of a trace without turns that is all that more than one session has."""
    shared = {chunk for s in trace.sessions for chunk in s.turns[0].chunks[: s.shared_chunks]}
    if not think:
        return len(shared) / workers
    own = sum(
        (len(turn.chunks) - session.shared_chunks) * turn.think * think
        for session in trace.sessions
        for turn in session.turns[:-1]
    )
    return own * rate / len(trace.sessions) / workers + len(shared)


def _longest(trace: Trace) -> int:
    return max(len(turn.chunks) for session in trace.sessions for turn in session.turns)
