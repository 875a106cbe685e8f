"""The loads, and the command lines of `baton bench` that measure them."""

import json
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from baton.bench.load.traffic.workload import Arrivals

Lengths = tuple[int, int]  # tokens of a prompt and of its answer

MIN_PERIODS = 3  # of a swinging load
REQUESTS_PER_USER = 4  # of a closed loop
WARM_UP_USERS, WARM_UP_REQUESTS = 4, 8
WARM_UP_TOKENS = 8
SHORT = ("2000/150", "saturated", "swing", "agents")
# For the embedded model on a CPU, lengths are divided by this.
SMALLER = 32
SMALL_LEVELS = (1.0, 2.0)
SMALL_PERIOD_S = 2.0
SMALL_SLO = "ttft=2s,itl=200"
SMALL_AGENTS = (
    "--turns", "3", "--prefix-len", "125", "--context-len", "190", "--input-len", "lognormal:28,0.8@4,250",
    "--output-len", "uniform:2,8", "--think-time", "exponential:0.05",
)  # fmt: skip
TRACE_SPEED = 0.5
TRACE_S = {"cuda": 150.0, "cpu": 12.0}
MOST_TURNS, FEWER_TURNS, FEW_AGENTS = 10, 8, 24
"""Of an agent, beside few agents and beside more."""


@dataclass(frozen=True)
class Load:
    """One kind of load.

    Attributes:
        lengths: one pair, or the two that a swinging load alternates between. Of agents and traces: those of
            the warm-up.
        levels: requests per second on two GPUs; users of a closed loop; requests of a batch, which start
            at once; agents at a time; speeds of a trace.
        slo: the objectives of each request, in the syntax of `--slo`.
        period: seconds in which a swinging load sends both pairs.
        context: tokens of the longest session.
        trace: a file in Mooncake's format.
        flags: more flags of `baton bench`.
    """

    name: str
    kind: Literal["open", "closed", "batch", "swing", "agents", "trace"]
    lengths: tuple[Lengths, ...]
    levels: tuple[float, ...]
    slo: str
    period: float = 20.0
    context: int = 33_000
    trace: Path | None = None
    flags: tuple[str, ...] = ()

    def name_at(self, level: float) -> str:
        """The load at a level, in names of rows."""
        return f"{self.name.replace('/', '_')}.{_LEVEL[self.kind]}{level:g}"

    def small(self) -> Self:
        """For the embedded model on a CPU."""
        flags, levels = self.flags, SMALL_LEVELS
        if self.kind == "agents":
            flags, levels = SMALL_AGENTS, SMALL_LEVELS[1:]
        elif self.kind == "trace":
            flags, levels = (*self.flags, "--advanced.length-scale", str(1 / SMALLER)), self.levels
        return replace(
            self,
            lengths=tuple((max(8, a // SMALLER), max(2, b // SMALLER)) for a, b in self.lengths),
            levels=levels,
            slo=SMALL_SLO,
            period=SMALL_PERIOD_S,
            flags=flags,
        )


_LEVEL = {"open": "r", "closed": "c", "batch": "b", "swing": "r", "agents": "a", "trace": "s"}

# TTFT within five times that of an idle H200, and a mean gap within 20 ms, about four steps of an idle one.
LOADS = (
    Load("2000/150", "open", ((2000, 150),), (8, 12, 22), "ttft=250,itl=20"),
    Load("8000/200", "open", ((8000, 200),), (1, 2, 3, 4), "ttft=1s,itl=20"),
    Load("500/500", "open", ((500, 500),), (6, 12, 24), "ttft=100,itl=20"),
    Load("200/20", "open", ((200, 20),), (40, 80), "ttft=75,itl=20"),
    Load("30000/100", "open", ((30000, 100),), (0.5, 0.8), "ttft=5s,itl=20"),
    Load("saturated", "closed", ((2000, 150),), (128, 256), "ttft=5s,itl=50"),
    Load("agents", "agents", ((11_000, 150),), (16, 48, 96), "ttft=2s,itl=50", context=49_152),
    Load("swing", "swing", ((2000, 50), (200, 500)), (12, 20), "ttft=250,itl=20"),
)

ENGINE_LOADS = (
    Load("prompts", "closed", ((2000, 8),), (1,), "ttft=5s,itl=50"),
    Load("long-prompts", "closed", ((8000, 8),), (1,), "ttft=5s,itl=50"),
    Load("steps", "batch", ((1000, 512),), (1, 8, 32, 64, 128, 256), "ttft=60s,itl=50"),
)
"""What one engine can: first tokens of single prompts, and gaps of answers that run side by side."""


def trace_load(path: Path, first: float) -> Load:
    """The first so many seconds of a trace in Mooncake's format."""
    flags = ("--advanced.first", f"{first:g}")
    return Load(
        path.stem, "trace", ((8000, 200),), (TRACE_SPEED,), "ttft=5s,itl=50",
        context=131_072, trace=path, flags=flags,
    )  # fmt: skip


def command(load: Load, level: float, requests: int, seed: int, directory: Path) -> list[str]:
    """The arguments of `baton bench` that measure a load at a level, with at least so many requests. Agents
    and traces have as many as they have.

    Both sides get the same prompts. Those of other levels differ, since the KV of a repeated prompt may be
    cached.
    """
    name = load.name_at(level)
    # A detected warm-up would exclude other requests for each side.
    common = ["--warmup", "0", "--seed", _seed_of(name, seed), "--slo", load.slo]
    if load.kind == "swing":
        trace = directory / f"{name}.trace.jsonl"
        write_swing(trace, load, level, requests, seed)
        return ["replay", str(trace), "--advanced.prompts", "text", "--advanced.session-blocks", "0", *common]
    if load.kind == "trace":
        return ["replay", str(load.trace), "--speed", f"{level:g}", *load.flags, *common]
    if load.kind == "agents":
        flags = load.flags or ("--turns", str(turns_beside(level)))
        return ["agents", "--concurrency", f"{level:g}", "--sessions", f"{2 * level:g}", *flags, *common]
    if load.kind == "closed":
        users = int(level)
        flags = ["--concurrency", str(users), "--requests", str(max(requests, REQUESTS_PER_USER * users))]
    elif load.kind == "batch":
        flags = ["--concurrency", f"{level:g}", "--requests", f"{level:g}"]
    else:
        flags = ["--rate", f"{level:g}", "--requests", str(requests)]
    return ["run", *_lengths(*load.lengths[0]), *flags, *common]


def turns_beside(agents: float) -> int:
    """Of each session, with so many agents at a time."""
    return MOST_TURNS if agents <= FEW_AGENTS else FEWER_TURNS


def warm_up(load: Load, seed: int) -> Iterator[list[str]]:
    """The arguments of `baton bench` that send the first prompts of each length."""
    for tokens, output in load.lengths:
        yield [
            "run", *_lengths(tokens, min(output, WARM_UP_TOKENS)), "--concurrency", str(WARM_UP_USERS),
            "--requests", str(WARM_UP_REQUESTS), "--warmup", "0",
            "--seed", _seed_of(f"{load.name}.warm_up.{tokens}", seed),
        ]  # fmt: skip


def write_swing(path: Path, load: Load, rate: float, requests: int, seed: int) -> None:
    """Writes a trace in Mooncake's format: Poisson arrivals whose lengths change twice a period. Another side
    may read this file, which is the same."""
    seconds = max(requests / rate, MIN_PERIODS * load.period)
    lines = []
    for at in Arrivals(rate).times(seed):
        if at >= seconds:
            break
        tokens, output = load.lengths[int(2 * at / load.period) % 2]
        lines.append({"timestamp": at * 1e3, "input_length": tokens, "output_length": output})
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    Path(file.name).replace(path)


def _lengths(tokens: int, output: int) -> Sequence[str]:
    return "--input-len", str(tokens), "--output-len", str(output)


def _seed_of(name: str, seed: int) -> str:
    return str((seed + zlib.crc32(name.encode())) % 2**31)
