"""Helpers of the tests of the load harness."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from baton.bench.load.target.answer import Record
from baton.bench.load.target.request import Dialect, Target
from baton.bench.load.target.tokenization import WORDS, Tokenization
from baton.bench.load.traffic.client import Client, ClientConfig
from baton.bench.load.traffic.workload import Arrivals, Distribution, Synthetic, Workload
from tests.within import WITHIN

# Words that the mock server counts as one token each.
SHORT_WORDS = tuple(w for w in WORDS if len(w) <= 5)
EXACT = Tokenization(SHORT_WORDS, 1.0, 1, "exact")


def record(
    intended: float = 0.0,
    ttft: float = 0.1,
    gaps: Sequence[float] = (),
    tokens: Sequence[int] = (),
    **more: Any,
) -> Record:
    """A request that went as told. Times in seconds."""
    arrivals = [intended + ttft]
    for gap in gaps:
        arrivals.append(arrivals[-1] + gap)
    fields: dict[str, Any] = {"index": 0, "output_tokens": sum(tokens) or len(arrivals)} | more
    return Record(
        intended=intended,
        sent=intended,
        ended=arrivals[-1],
        arrivals=[] if fields.get("failure") else arrivals,
        tokens=list(tokens),
        **fields,
    )


def client_config(url: str, workload: Workload, **more: Any) -> ClientConfig:
    """One client in a closed loop of one user, unless told otherwise."""
    fields: dict[str, Any] = {
        "index": 0,
        "clients": 1,
        "target": Target((url,), "completions", "mock", Dialect()),
        "workload": workload,
        "tokenization": EXACT,
        "seed": 3,
        "texts": 0,
        "run_id": "run",
        "arrivals": None,
        "concurrency": 1,
        "duration": None,
        "sessions": None,
        "time_scale": 1.0,
        "timeout": WITHIN,
        "drain": WITHIN,
    }
    return ClientConfig(**fields | more)


def open_loop(rate: float) -> dict[str, Any]:
    return {"arrivals": Arrivals(rate, None), "concurrency": 0}


async def run_client(
    config: ClientConfig,
    stop_when: Callable[[list[Record]], bool] = lambda records: False,
    start: float | None = None,
) -> list[Record]:
    """All records, in the order in which they ended. The client is stopped with the first one after which
    `stop_when` is true. `start`: time.monotonic() at which their times are 0; soon if not given."""
    records: list[Record] = []
    stop = asyncio.Event()

    def emit(record: Record) -> None:
        records.append(record)
        if stop_when(records):
            stop.set()

    await Client(config, emit).run(time.monotonic() + 0.01 if start is None else start, stop)
    return records


def short_prompts(output_tokens: int = 4, turns: int = 1, think_seconds: float = 0.0) -> Synthetic:
    """Sessions of prompts with three tokens."""
    lengths = [Distribution("fixed", (n,)) for n in (3, output_tokens, turns, think_seconds)]
    return Synthetic(1, lengths[0], lengths[1], lengths[2], lengths[3])
