"""Where the time to first token goes: the stages of a turn, from the traces of both workers.

submit    until the engine process has the request
lookup    without a fetch: until the prompt is queued
pin       with a fetch: until the other worker has found and pinned the KV
wait      until the first bytes of it come
bytes     until the last ones are verified
inject    until they are in the blocks, and the prompt is queued
queue     until its step begins
prefill   until the host has the token
device    the part of `prefill` in which the device computes the last step
reply     until the client has the token

All but `device` follow each other, and their sum is the time to first token.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.bench.overlap.trace import events


@dataclass(frozen=True)
class Turn:
    """A prompt that a worker computed. Times are in seconds of CLOCK_MONOTONIC."""

    role: str  # of the worker
    attempt_id: bytes
    submitted: float
    received: float  # the first token


class Traces:
    """The traces of both workers. They must have ended."""

    def __init__(self, directory: Path) -> None:
        self._by_attempt: dict[tuple[str, str], dict[str, Any]] = {}  # event and attempt
        self._steps: dict[str, list[tuple[float, float]]] = {}  # by role: when each ended, and its seconds
        self._pinned: list[float] = []
        for role in ("prefill", "decode"):
            self._read(role, directory / f"{role}-0-engine.trace")
        self._pinned.sort()

    def _read(self, role: str, path: Path) -> None:
        steps = self._steps[role] = []
        for event in events(path):
            name, about = event["name"], event["args"]
            at = event.get("ts", 0.0) / 1e6
            match name:
                case "taken" | "added":
                    self._by_attempt[name, about["attempt"]] = {"at": at}
                case "first token":
                    self._by_attempt[name, about["prefill"]] = about | {"at": at}
                case "prefix fetched":
                    for request in about["requests"]:
                        self._by_attempt[name, request] = about
                case "pinned":
                    self._pinned.append(at)
                case "step":
                    steps.append((at + event["dur"] / 1e6, event["dur"] / 1e6))

    def stages(self, turn: Turn) -> dict[str, float]:
        """Seconds of each stage, in order."""
        attempt = turn.attempt_id.hex()
        taken, added = (self._by_attempt[name, attempt]["at"] for name in ("taken", "added"))
        token = self._by_attempt["first token", attempt]
        began = token["at"] - token["computing"]
        moments = [("submit", taken)]
        if fetched := self._by_attempt.get(("prefix fetched", attempt)):
            pinned = self._pinned[bisect_left(self._pinned, taken)]
            moments += [
                ("pin", pinned),
                ("wait", fetched["first_frame"] / 1e6),
                ("bytes", fetched["last_frame"] / 1e6),
                ("inject", added),
            ]
        else:
            moments.append(("lookup", added))
        moments += [("queue", began), ("prefill", token["at"]), ("reply", turn.received)]
        found: dict[str, float] = {}
        for (_, before), (name, at) in itertools.pairwise([("", turn.submitted), *moments]):
            found[name] = at - before
            if name == "prefill":
                steps = self._steps[turn.role]
                found["device"] = steps[bisect_right(steps, (token["at"], 0.0)) - 1][1]
        return found


def series(traces: Traces, turns: Sequence[Turn]) -> dict[str, list[float]]:
    """By stage, the seconds of each turn that has it."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for turn in turns:
        for name, seconds in traces.stages(turn).items():
            found[name].append(seconds)
    return found
