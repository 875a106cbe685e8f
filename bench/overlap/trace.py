"""Reads moments of attempts from the traces of workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Joined:
    at: float
    size: int  # bytes of KV
    fetch_seconds: float


@dataclass
class Trace:
    """Times in seconds of CLOCK_MONOTONIC, which all processes of a host share."""

    first_token: dict[bytes, float] = field(default_factory=dict)  # by prefill id
    joined: dict[bytes, Joined] = field(default_factory=dict)  # by decode id

    @classmethod
    def read(cls, directory: Path) -> Trace:
        trace = cls()
        for path in directory.glob("*.trace"):
            for event in events(path):
                at, about = event.get("ts", 0.0) / 1e6, event["args"]
                match event["name"]:
                    case "first token":
                        trace.first_token[bytes.fromhex(about["prefill"])] = at
                    case "joined":
                        joined = Joined(at, about["bytes"], about["fetch_us"] / 1e6)
                        trace.joined[bytes.fromhex(about["decode"])] = joined
        return trace


def events(path: Path) -> Iterator[dict[str, Any]]:
    """Of one process. Complete when the process has ended."""
    for line in path.read_text().splitlines()[1:]:
        yield json.loads(line.rstrip(","))
