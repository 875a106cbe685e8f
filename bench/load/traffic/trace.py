"""Sessions from traces in Mooncake's format. Errors name file and line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from baton.bench.load.target.tokenization import Segment
from baton.bench.load.traffic.workload import Session, Turn
from baton.system.lines import bounded_lines

SAMPLE_TRACE = Path(__file__).parent / "samples" / "mooncake.jsonl"
MOONCAKE_BLOCK = 512  # tokens of one hash id (Mooncake, FAST 2025)

_FORM = (
    "Give Mooncake's format, one JSON object a line: "
    '{"timestamp": 0, "input_length": 655, "output_length": 52, "hash_ids": [1, 2]}'
)
_BLOCK, _TAIL = 101, 102  # uses of a seed


class TraceLine(msgspec.Struct):
    """One request of a trace: when it was sent, its lengths, and the hash ids of its prompt's blocks."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]  # ms
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[int] = []


def read_trace(path: Path) -> list[TraceLine]:
    """The requests in order of time."""
    decoder = msgspec.json.Decoder(TraceLine)
    lines: list[TraceLine] = []
    number = 0
    try:
        with path.open("rb") as file:
            for number, text in bounded_lines(file):  # noqa: B007 - the error names the line
                if text.strip():
                    lines.append(decoder.decode(text))
    except OSError as e:
        raise ValueError(f"trace {path}: {e.strerror}.") from e
    except msgspec.DecodeError as e:
        raise ValueError(f"trace {path}, line {number}: {e}. {_FORM}") from e
    except ValueError as e:
        raise ValueError(f"trace {path}, {e}. {_FORM}") from e
    if not lines:
        raise ValueError(f"trace {path} is empty.")
    return sorted(lines, key=lambda line: line.timestamp)


def until(lines: Sequence[TraceLine], seconds: float) -> list[TraceLine]:
    """The lines of the first so many seconds. At least the first one."""
    return [line for line in lines if line.timestamp - lines[0].timestamp < seconds * 1e3]


def spread(lines: Sequence[TraceLine]) -> list[TraceLine]:
    """Requests with equal time stamps arrive evenly until the next time stamp.

    Recorders that write once in some seconds make clumps, which no client ever sent. The last clump gets as
    long as the one before it.
    """
    stamps, starts, counts = np.unique(
        [line.timestamp for line in lines], return_index=True, return_counts=True
    )
    gaps = np.diff(stamps)
    gaps = np.append(gaps, gaps[-1:] if len(gaps) else 0.0)
    within = (np.arange(len(lines)) - np.repeat(starts, counts)) / np.repeat(counts, counts)
    times = (np.repeat(stamps, counts) + within * np.repeat(gaps, counts)).tolist()
    return [msgspec.structs.replace(line, timestamp=at) for line, at in zip(lines, times, strict=True)]


def _bound(lines: Sequence[TraceLine], blocks: int) -> list[int | None]:
    """Numbers of the sessions, in order of their first requests.

    Requests whose first `blocks` blocks are equal are one session. One with fewer blocks is alone.
    """
    if not blocks:
        return [None] * len(lines)
    numbers: dict[tuple[int, ...], int] = {}
    keys = (
        tuple(line.hash_ids[:blocks]) if len(line.hash_ids) >= blocks else (-1, index)
        for index, line in enumerate(lines)
    )
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def trace_sessions(
    lines: Sequence[TraceLine],
    *,
    seed: int,
    block: int,
    length_scale: float,
    least_input: int,
    session_blocks: int = 0,
) -> tuple[Session, ...]:
    """Sessions of one request with the lengths, times and shared blocks of the trace.

    Args:
        length_scale: scales blocks, inputs and outputs alike, so that the shared part of a prompt keeps its
            share.
        session_blocks: how many equal blocks bind requests to one session; 0: none.
    """
    scaled_block = max(1, round(block * length_scale))
    first = lines[0].timestamp
    return tuple(
        Session(
            at=(line.timestamp - first) / 1e3,
            bound=bound,
            turns=(
                Turn(
                    output_tokens=max(1, round(line.output_length * length_scale)),
                    segments=_segments(
                        line.hash_ids,
                        max(least_input, round(line.input_length * length_scale)),
                        scaled_block,
                        seed,
                        index,
                    ),
                ),
            ),
        )
        for index, (line, bound) in enumerate(zip(lines, _bound(lines, session_blocks), strict=True))
    )


def _segments(ids: Sequence[int], length: int, block: int, seed: int, index: int) -> tuple[Segment, ...]:
    """A whole block for each id that fits.

    The rest is a part of the next block, or unique if there is none.
    """
    complete, tokens = divmod(length, block)
    segments = [Segment((seed, _BLOCK, i), block) for i in ids[:complete]]
    tokens += block * (complete - len(segments))
    if tokens:
        cut = len(ids) > complete
        segments.append(Segment((seed, _BLOCK, ids[complete]) if cut else (seed, _TAIL, index), tokens))
    return tuple(segments)
